"""The head in chunks: scores and gradients of the whole, and logits of one chunk at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragen_pl.algorithms.kl import full_kl
from ragen_pl.models.distribution import entropy
from ragen_pl.models.logit_scale import LogitScale
from ragen_pl.modules.forward import ReferenceStates, sampled_states
from ragen_pl.modules.policy import StateReadout, TokenReadout
from ragen_pl.modules.reference import FrozenCopy


@pytest.fixture(scope="module")
def scored(make):
    """A policy in float64 with a bounded head, samples it has played at two temperatures, and a reference."""
    agent = make.agent()
    samples = make.batch(agent, groups=3).samples
    samples.temperature[:, ::2] = 0.6
    policy = agent.policy.double().eval()
    policy.bundle.facts = replace(
        policy.bundle.facts, logit_scale=LogitScale(factor=0.5, bound=4.0)
    )
    reference = FrozenCopy().build(policy)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter += 0.05 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(1)
            )
        states = reference(samples, (), readout=StateReadout())
    return policy, samples, reference, states


def plain_scores(policy, samples, reference, states, *, reverse):
    """The same by autograd alone, with all logits at once."""
    rows = [torch.arange(len(samples))]
    (found,) = sampled_states(policy.bundle, samples, (), rows)
    at = (found.rows, found.columns)
    temperature = samples.temperature[at][:, None]
    log_probs = policy.bundle.log_probs(found.hidden, temperature=temperature)
    of_reference = reference.bundle.log_probs(
        states[samples.token[at]].detach(), temperature=temperature
    )
    logprobs = log_probs.gather(-1, samples.input_ids[at][:, None]).squeeze(-1)
    pair = (log_probs, of_reference) if reverse else (of_reference, log_probs)
    return at, (logprobs, entropy(log_probs), full_kl(*pair))


def gradients(policy, scores):
    weights = torch.randn(
        3, len(scores[0]), dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    loss = sum((weight * part).sum() for weight, part in zip(weights, scores, strict=True))
    names, parameters = zip(*policy.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chunk=st.integers(1, 400), parts=st.integers(1, 4), reverse=st.booleans())
def test_chunks_change_neither_scores_nor_gradients(scored, chunk, parts, reverse):
    policy, samples, reference, states = scored
    at, plain = plain_scores(policy, samples, reference, states, reverse=reverse)
    numbers = samples.token[samples.turn >= 0]
    vocabulary = policy.bundle.lm_head(states[:1]).shape[-1]
    readout = TokenReadout(
        reference=ReferenceStates(reference, states[numbers], reverse=reverse),
        logits_mib=(chunk + 0.5) * 4 * vocabulary / 2**20,
    )
    rows = [part for part in torch.arange(len(samples)).tensor_split(parts) if len(part)]
    scores = policy(samples, (), microbatches=rows, readout=readout)
    found = (scores.logprobs[at], scores.entropy[at], scores.kl[at])
    for expected, part in zip(plain, found, strict=True):
        torch.testing.assert_close(part, expected.double(), rtol=1e-5, atol=1e-6)
    of_plain = gradients(policy, plain)
    largest = max(float(gradient.abs().max()) for gradient in of_plain.values())
    for name, gradient in gradients(policy, found).items():
        assert float((gradient - of_plain[name]).abs().max()) < 1e-6 * largest, name


def test_logits_of_one_chunk_exist_at_a_time(scored, monkeypatch):
    """Neither the forward nor the backward pass sees more tokens at once, and none keeps logits."""
    policy, samples, *_ = scored
    vocabulary = policy.bundle.lm_head(torch.zeros(1, 32).double()).shape[-1]
    seen, kept = [], []
    head = type(policy.bundle).lm_head

    def note(bundle, hidden):
        seen.append(len(hidden))
        return head(bundle, hidden)

    def pack(tensor):
        kept.append(tuple(tensor.shape))
        return tensor

    monkeypatch.setattr(type(policy.bundle), "lm_head", note)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        scores = policy(samples, (), readout=TokenReadout(logits_mib=10.5 * 4 * vocabulary / 2**20))
    forward = len(seen)
    assert max(seen) == 10 and sum(seen) == int((samples.turn >= 0).sum()) > 50
    assert (10, 32) in kept and not {(tokens, vocabulary) for tokens in range(1, 11)} & {*kept}
    scores.logprobs.sum().backward()
    assert sorted(seen[:forward]) == sorted(seen[forward:])
    policy.zero_grad()
