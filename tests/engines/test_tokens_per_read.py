"""Tokens that are sampled before the host reads them: the same responses, and few reads."""

import numpy as np
import pytest
from support.episodes.lake_episodes import proxy_of, words
from support.episodes.trajectories import make_request, roll_out, starts
from support.machines.host_reads import HostReads

from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.in_process.sampling import Responses
from ragen_pl.engines.protocol import generate
from ragen_pl.models.truncation import Truncation
from ragen_pl.modules.policy import PolicyModule


def sampled(bundle, *, tokens, per_read, **changes):
    engine = TransformersEngine(PolicyModule(bundle), tokens_per_read=per_read, **changes)
    prompts = [words(bundle, text) for text in ("me 1 2", "goal 3 0 avoid Up", "x", "me", "go")]
    requests = [
        make_request(prompt, session=n, tokens=tokens, seed=n) for n, prompt in enumerate(prompts)
    ]
    return generate(engine, requests, keep=False)


def test_the_host_reads_once_in_eight_tokens(lm, monkeypatch):
    reads, read = [], Responses.read
    monkeypatch.setattr(Responses, "read", lambda responses: reads.append(1) or read(responses))
    counts = []
    for tokens in (1, 60):
        reads.clear()
        with HostReads() as host:
            responses = sampled(lm, tokens=tokens, per_read=8)
        counts.append(host.count)
        longest = max(len(response.ids) for response in responses)
        assert len(reads) == -(-longest // 8)
    assert longest > 16
    assert counts[0] == counts[1]


@pytest.mark.parametrize("per_read", [3, 8, 100])
def test_responses_are_those_of_a_read_at_each_token(lm, per_read):
    plain, several = (sampled(lm, tokens=40, per_read=count) for count in (1, per_read))
    assert len({len(response.ids) for response in plain}) > 2
    for one, other in zip(plain, several, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.hit_length_limit == other.hit_length_limit
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert one.entropy == pytest.approx(other.entropy, abs=1e-5)


@pytest.mark.parametrize("kind", ["text", "images"])
@pytest.mark.parametrize("window", [2, "all"])
def test_episodes_are_those_of_a_read_at_each_token(lm, vlm, kind, window):
    bundle = vlm if kind == "images" else lm
    plain, several = (
        roll_out(
            proxy_of(bundle, window=window, kind=kind),
            TransformersEngine(PolicyModule(bundle), tokens_per_read=count),
            starts(4, 2),
            seed_key=(5, "sample"),
        )
        for count in (1, 5)
    )
    turns, others = (
        [turn for episode in each for turn in episode.turns] for each in (plain, several)
    )
    assert [t.response_ids.tolist() for t in turns] == [t.response_ids.tolist() for t in others]
    for turn, other in zip(turns, others, strict=True):
        np.testing.assert_allclose(turn.response_logprobs, other.response_logprobs, atol=1e-5)


def test_truncated_responses_have_the_ids_that_were_kept(lm):
    prompts = [words(lm, text) for text in ("me 1 2", "goal", "x")]
    truncations = [Truncation(top_k=3), None, Truncation(top_p=0.5)]
    plain, several = (
        generate(
            TransformersEngine(PolicyModule(lm), tokens_per_read=count),
            [
                make_request(prompt, session=n, seed=n, tokens=20, truncation=truncation)
                for n, (prompt, truncation) in enumerate(zip(prompts, truncations, strict=True))
            ],
            keep=False,
        )
        for count in (1, 8)
    )
    for one, other in zip(plain, several, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.kept_ids.tolist() == other.kept_ids.tolist()
        assert one.kept_counts.tolist() == other.kept_counts.tolist()
        assert len(one.kept_counts) == len(one.ids)
