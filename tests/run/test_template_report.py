"""The line about the chat template at the start of a run."""

from __future__ import annotations

import logging

import pytest
from support.models.family_models import tiny

from ragen_pl.prompts.context import ContextManager
from ragen_pl.run.reports import report_template

TRIMS = "chat template: it trims blanks around earlier responses; prompts keep the sampled tokens as they are"
STRIPS = "chat template: it strips the thoughts of earlier responses; "
PINNED = "chat template: it shows today's date, pinned to 26 Jul 2024 so that prompts stay the same"


@pytest.mark.parametrize(
    ("name", "settings", "lines"),
    [
        ("qwen2_5", {"window": "all"}, []),
        ("gemma3", {"window": 1}, []),
        ("gemma3", {"window": 3}, [TRIMS]),
        ("gemma3", {"window": "all"}, [TRIMS + ", so an episode is one sample"]),
        ("llama3_2", {"window": "all"}, [PINNED, TRIMS + ", so an episode is one sample"]),
        ("llama3_2", {"template_kwargs": {"date_string": "today"}}, []),
        ("qwen3", {"window": 1}, []),
        (
            "qwen3",
            {"window": "all"},
            [
                STRIPS
                + "each turn is a sample of its own: correct, but slower; context.window=1 avoids the cost, "
                "context.keep_thoughts=true makes an episode one sample"
            ],
        ),
        (
            "qwen3",
            {"window": "all", "keep_thoughts": True},
            [STRIPS + "prompts keep the sampled tokens as they are, so an episode is one sample"],
        ),
        (
            "qwen2_5_vl",
            {"window": "all", "template_kwargs": {"add_vision_id": True}},
            [
                "chat template: the text around a message depends on its place; each turn is a sample of its own: "
                "correct, but slower; context.window=1 avoids the cost"
            ],
        ),
    ],
)
def test_the_run_says_what_the_chat_template_does(caplog, name, settings, lines):
    with caplog.at_level(logging.INFO, logger="ragen_pl"):
        report_template(ContextManager(tiny(name), **settings))
    assert caplog.messages == lines
