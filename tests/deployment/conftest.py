from __future__ import annotations

import pytest
from support.episodes.rollout_fixtures import lively
from support.models.tiny_models import TEXT

from ragen_pl.base.prompt_formats import PromptFormat
from ragen_pl.models.build import build_small_lm
from ragen_pl.models.bundle import ModelBundle


@pytest.fixture(scope="session")
def native_lm() -> ModelBundle:
    bundle = lively(build_small_lm(seed=0, text=TEXT, prompt_format=PromptFormat.NATIVE))
    bundle.calls_tools = True
    return bundle
