"""The distribution that tokens are sampled from: its entropy, and its scores in little memory."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.episodes.reference_cases import reference_cases

from ragen_pl.algorithms.aggregation import Aggregation, aggregate
from ragen_pl.algorithms.kl import full_kl
from ragen_pl.models.distribution import (
    TopLogprobs,
    TopTokens,
    draw,
    entropy,
    log_distribution,
    score_distributions,
    top_logprobs,
)


def test_entropy_by_hand_with_a_banned_token() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25, 0.4], [1.0, 1e-30, 1e-30, 0.3]]).log().requires_grad_()
    log_probs = log_distribution(logits, banned=torch.tensor([3]))
    assert entropy(log_probs).tolist() == pytest.approx([1.5 * math.log(2), 0.0])
    assert entropy(log_distribution(logits.half())).dtype == torch.float32
    entropy(log_probs)[0].backward()
    assert logits.grad[0].isfinite().all()


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 7),
    vocabulary=st.integers(3, 40),
    bans=st.integers(0, 2),
    with_reference=st.booleans(),
    reverse=st.booleans(),
    entropy_gradient=st.booleans(),
)
def test_scores_and_gradients_are_those_of_the_plain_computation(
    seed, tokens, vocabulary, bans, with_reference, reverse, entropy_gradient
):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits, reference = 4 * draw(tokens, vocabulary), 4 * draw(tokens, vocabulary)
    token = torch.randint(bans, vocabulary, (tokens,), generator=generator)
    temperature, banned = draw(tokens, 1).exp(), torch.arange(bans)
    weights = draw(3, tokens)
    if not entropy_gradient:
        weights[1] = 0

    def gradient(scores, leaf):
        parts = [part for part in scores if part is not None]
        loss = sum((weight * part).sum() for weight, part in zip(weights, parts, strict=False))
        return torch.autograd.grad(loss, leaf)[0]

    leaf = logits.clone().requires_grad_()
    log_probs = log_distribution(leaf, temperature=temperature, banned=banned)
    plain = [log_probs.gather(-1, token[:, None]).squeeze(-1), entropy(log_probs)]
    if with_reference:
        of_reference = log_distribution(reference, temperature=temperature, banned=banned)
        pair = [of_reference.float(), log_probs.float()]
        plain.append(full_kl(*(pair[::-1] if reverse else pair)))

    own = logits.clone().requires_grad_()
    scores = score_distributions(
        own * 1.0,  # the logits are overwritten
        token,
        temperature=temperature,
        banned=banned,
        reference=reference.clone() if with_reference else None,
        reverse=reverse,
        entropy_gradient=entropy_gradient,
    )
    assert (
        scores.logprobs.dtype == torch.float64 and scores.entropy.requires_grad == entropy_gradient
    )
    for expected, found in zip(plain, scores, strict=False):
        torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-5, atol=1e-5)
    # the plain divergence is in float32, of log-probs below -100
    torch.testing.assert_close(gradient(scores, own), gradient(plain, leaf), rtol=1e-4, atol=1e-5)


def known_of(given: dict) -> TopLogprobs:
    """Return what a server tells of a teacher: the log-probs of its most likely ids, of which one comes again."""
    logprobs = log_distribution(
        torch.tensor(given["teacher_logits"], dtype=torch.float64),
        temperature=torch.tensor(given["temperature"])[:, None],
        banned=torch.tensor(given["banned"], dtype=torch.int64),
    )
    known, ids = logprobs.topk(min(given["k"], logprobs.shape[1]))
    rest = (1 - known.exp().sum(-1, keepdim=True)).clamp(min=1e-7).log()
    ids = torch.cat([ids, ids[:, :1]], dim=1).int()
    return TopLogprobs(ids, torch.cat([known, known[:, :1], rest], dim=1).float())


def divergence_of(given: dict, *, served: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of a student as a leaf, and their divergence from the teacher at each token."""
    leaf = torch.tensor(given["student_logits"]).requires_grad_()
    scores = score_distributions(
        leaf * 1,
        torch.zeros(len(leaf), dtype=torch.int64),
        temperature=torch.tensor(given["temperature"])[:, None],
        banned=torch.tensor(given["banned"], dtype=torch.int64),
        reference=known_of(given) if served else torch.tensor(given["teacher_logits"]),
        reverse=given["direction"] == "reverse",
        top=TopTokens(given["k"], given["support"] == "teacher") if "k" in given else None,
    )
    return leaf, scores.kl


@pytest.mark.parametrize(
    ("case", "served"),
    [(case, False) for case in reference_cases("opd_full", "opd_topk")]
    + [
        (case, True)
        for case in reference_cases("opd_topk")
        if case["inputs"]["support"] == "teacher"
    ],
)
def test_divergence_and_gradient_of_the_reference(case, served):
    """Both directions, with temperatures, banned ids and weights of tokens, over all ids or the most likely ones."""
    given, expected = case["inputs"], case["outputs"]
    leaf, divergence = divergence_of(given, served=served)
    weight = torch.tensor(given["weight"])
    loss = aggregate(
        divergence[None], weight[None], how=Aggregation.TOKEN_MEAN, tokens=weight.sum(), sequences=1
    )
    (gradient,) = torch.autograd.grad(loss, leaf)
    found = {
        "divergence": divergence * (weight > 0),
        "loss": loss,
        "grad_student_logits": gradient,
    }
    for name, value in found.items():
        torch.testing.assert_close(value, torch.tensor(expected[name]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_equal_distributions_have_no_divergence_and_no_gradient(direction):
    logits = 4 * torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    given = {
        "student_logits": logits.tolist(),
        "teacher_logits": (logits + 2.0).tolist(),
        "temperature": [0.5, 1.0, 1.5],
        "banned": [1],
        "direction": direction,
    }
    leaf, divergence = divergence_of(given)
    (gradient,) = torch.autograd.grad(divergence.sum(), leaf)
    assert divergence.abs().max() < 1e-6 and gradient.abs().max() < 1e-6
    given["teacher_logits"] = given["student_logits"]
    leaf, divergence = divergence_of(given)
    assert not divergence.any()
    (gradient,) = torch.autograd.grad(divergence.sum(), leaf)
    assert gradient.abs().max() < 1e-7


@pytest.mark.parametrize("of_reference", [True, False])
@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 9])
def test_of_equally_likely_ids_the_lower_ones_are_the_top(of_reference, number):
    scores = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 0.0, 2.0, 1.0], [0.0] * 8])
    pair = torch.randn(2, 8).log_softmax(-1), scores.log_softmax(-1)
    reference, log_probs = pair[::-1] if of_reference else pair
    top = TopTokens(number, of_reference)
    found = top_logprobs(reference, log_probs, top=top, scratch=torch.empty(2, 8))
    order = [[1, 2, 4, 6, 0, 3, 7, 5], [*range(8)]]
    assert found.ids.sort(1).values.tolist() == [sorted(row[:number]) for row in order]
    torch.testing.assert_close(found.logprobs[:, :-1], reference.gather(1, found.ids))


@pytest.mark.parametrize("gap", [20.0, 40.0, 200.0])
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_a_student_that_is_certain_of_its_top_ids_learns_what_the_teacher_thinks_of_the_others(
    direction, gap
):
    """Its probability of all others together is below that of any number in float32."""
    student, teacher = [0.0, gap, 1.0, -1.0], [0.5, 0.0, 1.0, 2.0]
    given = {
        "student_logits": [student], "teacher_logits": [teacher], "temperature": [1.0], "banned": [], "k": 1,
        "support": "student", "direction": direction,
    }  # fmt: skip
    leaf, divergence = divergence_of(given)
    (gradient,) = torch.autograd.grad(divergence.sum(), leaf)
    own = torch.tensor(student, dtype=torch.float64).requires_grad_()
    # two outcomes: the second id, and all others
    p, q = own.log_softmax(0), torch.tensor(teacher, dtype=torch.float64).log_softmax(0)
    others = torch.tensor([0, 2, 3])
    of_student, of_teacher = (torch.stack([each[1], each[others].logsumexp(0)]) for each in (p, q))
    pair = (of_student, of_teacher) if direction == "reverse" else (of_teacher, of_student)
    expected = (pair[0].exp() * (pair[0] - pair[1])).sum()
    (wanted,) = torch.autograd.grad(expected, own)
    torch.testing.assert_close(divergence[0].double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient[0].double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_divergence_of_each_direction_keeps_two_tensors_of_the_logits_shape(reverse):
    kept = []

    def pack(tensor):
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        score_distributions(
            torch.randn(2, 5, requires_grad=True) * 1,
            torch.tensor([1, 2]),
            temperature=torch.ones(2, 1),
            banned=torch.tensor([0]),
            reference=torch.randn(2, 5),
            reverse=reverse,
        )
    assert kept.count((2, 5)) == 2


@pytest.mark.parametrize("reverse", [False, True])
def test_a_kept_graph_gives_the_gradient_of_a_divergence_again(reverse):
    """Its buffer is used up by the last backward pass alone."""
    leaf = torch.randn(2, 5, requires_grad=True)
    scores = score_distributions(
        leaf * 1,
        torch.tensor([1, 2]),
        temperature=torch.ones(2, 1),
        banned=torch.tensor([0]),
        reference=torch.randn(2, 5),
        reverse=reverse,
    )
    (first,) = torch.autograd.grad(scores.kl.sum(), leaf, retain_graph=True)
    (second,) = torch.autograd.grad(scores.kl.sum(), leaf)
    assert first.any() and first.equal(second)
    with pytest.raises(RuntimeError):
        scores.kl.sum().backward()


def test_gradient_has_the_type_of_the_logits():
    leaf = torch.randn(2, 5, dtype=torch.bfloat16, requires_grad=True)
    scores = score_distributions(
        leaf * 1, torch.tensor([1, 2]), temperature=torch.ones(2, 1), banned=torch.tensor([0])
    )
    assert scores.logprobs.dtype == torch.float32
    (gradient,) = torch.autograd.grad(scores.logprobs.sum(), leaf)
    assert gradient.dtype == torch.bfloat16 and not gradient[:, 0].any()


@settings(max_examples=40)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 2**31),
            st.floats(0, 1, exclude_max=True),
            st.sampled_from([0.5, 5.0, 30.0]),
        ),
        min_size=1,
        max_size=4,
    ),
    size=st.sampled_from([8192, 8193, 9000]),
)
def test_a_large_vocabulary_is_drawn_from_by_the_cumulative_distribution(rows, size):
    seeds, uniforms, scales = zip(*rows, strict=True)
    logits = torch.stack(
        [
            scale * torch.randn(size, generator=torch.Generator().manual_seed(seed))
            for seed, scale in zip(seeds, scales, strict=True)
        ]
    )
    # most of a vocabulary may be left out
    log_probs = log_distribution(logits, banned=torch.arange(size - 700, size))
    drawn = draw(log_probs, torch.tensor(uniforms, dtype=torch.float64), greedy=False)
    for row, token in enumerate(drawn.tolist()):
        probs = log_probs[row].exp().double()
        assert probs[token] > 0
        target = (1 - uniforms[row]) * probs.sum()
        assert probs[:token].sum() <= target + 1e-12
        assert probs[: token + 1].sum() >= target - 1e-12


@pytest.mark.parametrize("uniform", [0.0, 2**-53, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("likely", [0, 511, 512, 8191, 8999])
def test_a_token_of_probability_0_is_never_drawn_from_a_large_vocabulary(uniform, likely):
    log_probs = torch.full((1, 9000), -float("inf"))
    log_probs[0, likely] = 0.0
    drawn = draw(log_probs, torch.tensor([uniform], dtype=torch.float64), greedy=False)
    assert drawn.tolist() == [likely]


def test_a_row_without_numbers_draws_a_token_of_the_vocabulary():
    drawn = draw(torch.full((1, 9000), float("nan")), torch.tensor([0.3]).double(), greedy=False)
    assert 0 <= int(drawn) < 9000
