"""Engines on vLLM, one at a time."""

from __future__ import annotations

import pytest
from support.models.vllm_models import build, start

from ragen_pl.engines.vllm.engine import VLLMEngine
from ragen_pl.models.bundle import ModelBundle


@pytest.fixture(scope="module", params=("tied", "images"))
def engine(request):
    """An engine that the tests of a module share; they restore the weights that they change."""
    built = start(build(request.param))
    yield built
    built.close()


@pytest.fixture
def start_engine():
    """Return a function that starts an engine for one test; its `bundle` builds a model."""
    started: list[VLLMEngine] = []

    def make(bundle: ModelBundle, **settings) -> VLLMEngine:
        started.append(start(bundle, **settings))
        return started[-1]

    yield make
    for engine in started:
        engine.close()
