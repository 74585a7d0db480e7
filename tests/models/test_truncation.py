"""Truncated sampling: which ids are kept, and the distribution over them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragen_pl.models.distribution import draw, log_distribution, score_distributions
from ragen_pl.models.truncation import KeptIds, Truncation

PROBABILITIES = torch.tensor([[0.4, 0.1, 0.3, 0.15, 0.05]])
BANNED = torch.tensor([0])


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [
        (Truncation(top_p=0.7), [0, 2]),
        (Truncation(top_p=0.71), [0, 2, 3]),
        (Truncation(top_p=1e-9), [0]),
        (Truncation(top_k=1), [0]),
        (Truncation(top_k=3), [0, 2, 3]),
        (Truncation(top_k=99), [0, 1, 2, 3, 4]),
        (Truncation(min_p=0.36), [0, 2, 3]),
        (Truncation(min_p=0.76), [0]),
        # 0.4 and 0.3 are 0.57 and 0.43 of what min_p leaves
        (Truncation(min_p=0.7, top_p=0.56), [0]),
        (Truncation(top_k=2, top_p=0.58), [0, 2]),
        (Truncation(), [0, 1, 2, 3, 4]),
    ],
)
def test_the_ids_that_are_kept(truncation, expected) -> None:
    log_probs = truncation.truncated(PROBABILITIES.log())
    assert (log_probs > -1e29).nonzero()[:, 1].tolist() == expected
    kept = PROBABILITIES[0, expected]
    torch.testing.assert_close(log_probs.exp()[0, expected], kept / kept.sum())
    assert torch.isfinite(log_probs).all() and bool(truncation) == (truncation != Truncation())


def test_ids_that_are_as_probable_as_the_last_one_are_kept() -> None:
    assert Truncation(top_k=2).counts(torch.tensor([[0.4, 0.2, 0.2, 0.2]])).tolist() == [4]


def kept_as_vllm_does(probabilities: np.ndarray, truncation: Truncation) -> set[int]:
    """Return what vLLM's own kernels for CPUs keep: ascending order, sums from the least probable id."""
    kept = probabilities >= truncation.min_p * probabilities.max()
    if truncation.top_k is not None:
        limit = np.sort(np.where(kept, probabilities, 0))[::-1][
            min(truncation.top_k, len(kept)) - 1
        ]
        kept &= probabilities >= limit
    order = np.argsort(np.where(kept, probabilities, 0), kind="stable")
    share = np.where(kept, probabilities, 0)[order]
    dropped = (share / share.sum()).cumsum() <= 1 - truncation.top_p
    dropped[-1] = False
    kept[order[dropped]] = False
    return set(kept.nonzero()[0].tolist())


@given(
    seed=st.integers(0, 10**6),
    top_p=st.floats(0.05, 0.999),
    top_k=st.none() | st.integers(1, 40),
    min_p=st.floats(0, 0.9),
)
def test_the_kept_ids_are_vllms(seed, top_p, top_k, min_p) -> None:
    rng = np.random.default_rng(seed)
    probabilities = rng.dirichlet(np.full(30, 0.3))
    truncation = Truncation(top_p=top_p, top_k=top_k, min_p=min_p)
    log_probs = torch.from_numpy(probabilities)[None].log()
    kept = (truncation.truncated(log_probs) > -1e29).nonzero()[:, 1].tolist()
    assert set(kept) == kept_as_vllm_does(probabilities, truncation)


@given(seed=st.integers(0, 10**6), top_p=st.floats(0.3, 0.99), rank=st.integers(-1, 1))
def test_the_ids_that_an_engine_kept_are_found_at_its_own_limit(seed, top_p, rank) -> None:
    """Where rounding moves its limit by one id, its log-probs say so."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = torch.log_softmax(torch.randn(1, 40, generator=generator), dim=-1).double()
    ordered, ids = log_probs.exp().sort(descending=True)
    count = int(Truncation(top_p=top_p).counts(ordered))
    # the engine's limit lies just above or below the trainer's
    limit = float(ordered[0, :count].sum()) + (rank - 0.5) * 1e-6
    truncation = Truncation(top_p=min(limit, 1.0))
    engine = truncation.truncated(log_probs)
    own = ids[0, 0]
    trainer = log_probs + 1e-5 * torch.randn(log_probs.shape, generator=generator)
    found = truncation.kept_by_engine(trainer, own[None], engine[0, own][None])
    wanted = (engine > -1e29).nonzero()[:, 1].tolist()
    assert sorted(found.ids.tolist()) == wanted


def test_a_sampled_id_is_always_among_the_kept() -> None:
    """With weights of another precision it may be far from the trainer's own limit."""
    found = Truncation(top_k=1).kept_by_engine(
        PROBABILITIES.log().repeat(2, 1), torch.tensor([4, 0]), torch.tensor([-0.1, torch.nan])
    )
    assert found.ids.tolist() == [0, 4] and found.counts.tolist() == [2, 0]
    impossible = torch.tensor([[0.6, 0.3, 0.1, 0.0]]).log()
    found = Truncation(top_p=0.8).kept_by_engine(
        impossible, torch.tensor([3]), torch.tensor([-0.1])
    )
    assert found.ids.tolist() == [0, 3]


@given(counts=st.lists(st.integers(0, 4), max_size=8), data=st.data())
def test_kept_ids_are_selected_split_and_joined_by_token(counts, data) -> None:
    of_token = [list(range(10 * n, 10 * n + count)) for n, count in enumerate(counts)]
    parts = [
        KeptIds(torch.tensor(ids, dtype=torch.int32), torch.tensor([len(ids)])) for ids in of_token
    ]
    kept = KeptIds.join(parts) if parts else KeptIds.all_of(0, device=torch.device("cpu"))
    assert len(kept) == len(counts) and kept.counts.tolist() == counts
    numbers = st.lists(st.integers(0, len(counts) - 1), max_size=6) if counts else st.just([])
    index = data.draw(numbers)
    selected = kept.select(torch.tensor(index, dtype=torch.int64))
    assert selected.ids.tolist() == [one for n in index for one in of_token[n]]
    assert selected.counts.tolist() == [counts[n] for n in index]
    split = kept.split(data.draw(st.integers(1, 5)))
    assert [part.ids.tolist() for part in split] == [
        [one for ids in of_token[first : first + len(part)] for one in ids]
        for first, part in zip(np.cumsum([0, *map(len, split[:-1])]).tolist(), split, strict=True)
    ]


# ---- the gradient


def plain(logits, tokens, temperature, kept):
    """Return log-prob, entropy and the log-probs as autograd computes them, over the kept ids."""
    log_probs = log_distribution(logits, temperature=temperature, banned=BANNED)
    mask = torch.zeros_like(log_probs, dtype=torch.bool)
    for row, ids in enumerate(kept):
        mask[row, ids if ids else slice(None)] = True
    log_probs = torch.log_softmax(log_probs.masked_fill(~mask, -1e30), dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, tokens[:, None]).squeeze(-1), entropy, log_probs


@pytest.mark.parametrize("with_reference", [False, True])
def test_scores_and_gradients_over_kept_ids_are_those_of_autograd(with_reference) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    other = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    tokens, temperature = torch.tensor([2, 3, 8, 5]), torch.tensor([[0.7], [1.0], [1.3], [1.0]])
    kept = [[2, 4, 7], [3], [], [1, 5]]
    ids = KeptIds(
        torch.tensor([one for row in kept for one in row], dtype=torch.int32),
        torch.tensor([3, 4, 4, 6]),
    )
    weights = torch.randn(3, 4, generator=generator, dtype=torch.float64)

    own = logits.clone().requires_grad_(True)
    logprobs, entropy, log_probs = plain(own, tokens, temperature, kept)
    total = (logprobs * weights[0]).sum() + (entropy * weights[1]).sum()
    if with_reference:
        reference = plain(other, tokens, temperature, kept)[2]
        kl = (reference.exp() * (reference - log_probs)).sum(-1)
        total = total + (kl * weights[2]).sum()
    total.backward()

    lean = logits.clone().requires_grad_(True)
    scores = score_distributions(
        lean.clone(),
        tokens,
        temperature=temperature,
        banned=BANNED,
        reference=other.clone() if with_reference else None,
        kept=ids,
    )
    found = (scores.logprobs * weights[0]).sum() + (scores.entropy * weights[1]).sum()
    if with_reference:
        torch.testing.assert_close(scores.kl, kl)
        found = found + (scores.kl * weights[2]).sum()
    found.backward()
    torch.testing.assert_close(scores.logprobs, logprobs)
    torch.testing.assert_close(scores.entropy, entropy)
    torch.testing.assert_close(lean.grad, own.grad)
    # ids that are not kept have no gradient
    assert lean.grad[1].abs().max() == 0 and lean.grad[0, [0, 1, 3, 5, 6, 8]].abs().max() == 0


def test_the_gradient_is_that_of_the_expected_reward_under_truncated_sampling() -> None:
    """Against finite differences of the expectation over all ids, with the kept ones fixed."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1, 7, generator=generator, dtype=torch.float64)
    rewards = torch.randn(7, generator=generator, dtype=torch.float64)
    kept = (Truncation(top_p=0.8).truncated(torch.log_softmax(logits, -1)) > -1e29)[0]

    def expected_reward(logits):
        probabilities = torch.where(kept, torch.softmax(logits, -1), 0.0)
        return (probabilities / probabilities.sum() * rewards).sum()

    step = 1e-6 * torch.eye(7, dtype=torch.float64)
    numeric = torch.stack(
        [(expected_reward(logits + one) - expected_reward(logits - one)) / 2e-6 for one in step]
    )
    ids = kept.nonzero().squeeze(-1)
    probabilities = torch.softmax(logits, -1)[0, ids] / torch.softmax(logits, -1)[0, ids].sum()
    rows = logits.repeat(len(ids), 1).requires_grad_(True)
    scores = score_distributions(
        rows.clone(),
        ids,
        temperature=torch.ones(len(ids), 1),
        banned=torch.zeros(0, dtype=torch.int64),
        kept=KeptIds(ids.int().repeat(len(ids)), torch.arange(1, len(ids) + 1) * len(ids)),
    )
    # E_q[r d log q]: each kept id as often as it is sampled
    (scores.logprobs * probabilities * rewards[ids]).sum().backward()
    torch.testing.assert_close(rows.grad.sum(0), numeric, atol=1e-8, rtol=1e-6)


def test_only_kept_ids_are_drawn_as_often_as_they_are_probable() -> None:
    truncation, count = Truncation(top_p=0.8, min_p=0.1), 20_000
    log_probs = torch.log_softmax(
        torch.randn(1, 12, generator=torch.Generator().manual_seed(1)), -1
    )
    own = truncation.truncated(log_probs)
    uniforms = torch.from_numpy(np.random.default_rng(0).random(count))
    drawn = draw(own.expand(count, -1), uniforms, greedy=torch.zeros(count, dtype=torch.bool))
    found = torch.bincount(drawn, minlength=12) / count
    assert (found[own[0] < -1e29] == 0).all()
    torch.testing.assert_close(found, own[0].exp(), atol=0.015, rtol=0)
