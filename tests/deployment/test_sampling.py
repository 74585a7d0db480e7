"""Sampling parameters of a request to a served policy."""

from __future__ import annotations

import re

import pytest

from ragen_pl.agent_programs.serving.chat_request import read_request
from ragen_pl.agent_programs.serving.errors import RequestError
from ragen_pl.agent_programs.serving.images import ImageReader
from ragen_pl.deployment.sampling import read_sampling
from ragen_pl.models.truncation import Truncation
from ragen_pl.rollout.settings import EpisodeSettings

RUN = EpisodeSettings(temperature=0.7, top_p=0.9, top_k=40)


def test_what_is_left_out_is_as_in_the_run():
    sampling = read_sampling({}, RUN)
    assert sampling.temperature == 0.7
    assert sampling.truncation == Truncation(top_p=0.9, top_k=40)
    assert read_sampling({}, RUN).seed != sampling.seed


@pytest.mark.parametrize(
    ("given", "temperature", "truncation"),
    [
        ({"temperature": 1, "top_p": 1, "top_k": 0}, 1.0, None),
        ({"temperature": 2.0, "top_p": 0.5}, 2.0, Truncation(top_p=0.5, top_k=40)),
        ({"top_k": 3, "top_p": 1.0, "min_p": 0.1}, 0.7, Truncation(top_k=3, min_p=0.1)),
        ({"top_k": -1}, 0.7, Truncation(top_p=0.9)),
        ({"temperature": 0}, 0.0, None),
        ({"temperature": 1e-9}, 0.0, None),
        ({"presence_penalty": 0, "repetition_penalty": 1.0}, 0.7, Truncation(top_p=0.9, top_k=40)),
        (
            {"frequency_penalty": 0.0, "reasoning_effort": "low", "top_k": 5},
            0.7,
            Truncation(top_p=0.9, top_k=5),
        ),
    ],
)
def test_honoured(given, temperature, truncation):
    sampling = read_sampling(given, RUN)
    assert (sampling.temperature, sampling.truncation) == (temperature, truncation)


def test_seed():
    first, same, other = (read_sampling({"seed": seed}, RUN).seed for seed in (5, 5, -6))
    assert first == same != other


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": 2.1}, "temperature=2.1"),
        ({"temperature": "1"}, "temperature='1'"),
        ({"temperature": True}, "temperature=True"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"min_p": 1}, "min_p"),
        ({"top_k": 2.5}, "top_k=2.5"),
        ({"top_k": -2}, "top_k=-2"),
        ({"seed": "a"}, "seed='a'"),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5"),
        ({"frequency_penalty": 0.5}, "frequency_penalty=0.5"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"chat_template_kwargs": {"a": 1}}, "context.template_kwargs"),
    ],
)
def test_refused(given, named):
    body = {"messages": [{"role": "user", "content": "go"}], **given}
    with pytest.raises(RequestError, match=re.escape(named)) as caught:
        read_sampling(read_request(body, ImageReader()).sampling, RUN)
    assert caught.value.status == 400
