"""The distribution that tokens are sampled from, computed alike in the engine and the trainer."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ragen_pl.models.truncation import BANNED, KeptIds

# tokens of a vocabulary that is summed by blocks, and those of a block
_LARGE, _BLOCK = 8192, 512
# log-probabilities of all ids outside the top ones: of a reference, and of a distribution that is certain of these
_LEAST, _LEAST_OWN = math.log(1e-12), -1e4


def log_distribution(
    logits: Tensor, *, temperature: Tensor | float = 1.0, banned: Tensor | None = None
) -> Tensor:
    """Return float32 log-probabilities `[…, vocab]` after temperature and bans.

    Args:
        logits: `[…, vocab]` in any floating type; the computation is in float32, or in float64 for such logits.
        temperature: Sampling temperature; a tensor broadcasts against `logits`.
        banned: Ids that are never sampled, int64; None for none.

    Examples:
        >>> log_distribution(torch.tensor([0.0, 0.0, 5.0]), banned=torch.tensor([2])).exp()
        tensor([0.5000, 0.5000, 0.0000])
    """
    logits = logits.to(_computed(logits))
    if not (isinstance(temperature, float) and temperature == 1.0):
        logits = logits / temperature
    if banned is not None and len(banned):
        logits = logits.index_fill(-1, banned, BANNED)
    return torch.log_softmax(logits, dim=-1)


def entropy(log_probs: Tensor) -> Tensor:
    """Return the entropy in nats, `[…]`, of log-probabilities `[…, vocab]`."""
    return -(log_probs.exp() * log_probs).sum(-1)


class TopTokens(NamedTuple):
    """The most likely ids of a distribution or of its reference, which a divergence tells apart; see `with_bucket`."""

    number: int
    of_reference: bool


class TopLogprobs(NamedTuple):
    """What is known of a reference's distributions: some ids, and all others as one outcome."""

    ids: Tensor
    """Whole numbers `[tokens, k]`; a distribution of which fewer are known repeats one of them."""
    logprobs: Tensor
    """Log-probabilities of the ids and then of all others together, `[tokens, k + 1]`."""


class DistributionScores(NamedTuple):
    """Scores of distributions over the vocabulary, float32 `[tokens]`, float64 for logits in float64."""

    logprobs: Tensor
    """Log-probability of each distribution's token."""
    entropy: Tensor
    """Nats."""
    kl: Tensor | None
    """KL(reference ‖ distribution), or KL(distribution ‖ reference); None without a reference."""


def score_distributions(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: Tensor,
    banned: Tensor,
    reference: Tensor | TopLogprobs | None = None,
    reverse: bool = False,
    top: TopTokens | None = None,
    entropy_gradient: bool = True,
    kept: KeptIds | None = None,
) -> DistributionScores:
    """Return the scores of distributions given by logits, in little memory.

    The same values as `log_distribution` with `gather`, `entropy` and `full_kl` give. One tensor of the logits' shape
    is kept for the gradient, and another for that of a divergence; autograd would keep six. The gradient of a
    divergence is written over the latter, unless the graph is kept for another backward pass.

    Args:
        logits: `[tokens, vocab]`, used up: the computation overwrites them.
        tokens: int64 `[tokens]`.
        temperature: `[tokens, 1]`.
        banned: Ids of probability 0, int64.
        reference: Logits of the reference, `[tokens, vocab]`, without gradient and overwritten too; or what is known of
            its distributions, after temperature and bans.
        reverse: Whether the divergence is KL(distribution ‖ reference) instead of KL(reference ‖ distribution).
        top: Ids that the divergence from logits tells apart, where all others are one outcome; None for all.
        entropy_gradient: Whether the entropy has a gradient.
        kept: Ids that the distributions are restricted to, the reference's too; None for all.
    """
    scores = _DistributionScores.apply(
        logits, tokens, temperature, banned, reference, reverse, top, entropy_gradient, kept
    )
    return DistributionScores(*scores)


class _DistributionScores(torch.autograd.Function):
    """`score_distributions` with its gradient, rounded as autograd rounds that of the plain computation.

    With p the distribution and q the reference's: d log p_t / d log p = 1_t, dH / d log p = -p (log p + 1),
    dKL(q ‖ p) / d log p = -q, dKL(p ‖ q) / d log p = p (log p - log q), up to p, which has no gradient for the logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        tokens: Tensor,
        temperature: Tensor,
        banned: Tensor,
        reference: Tensor | TopLogprobs | None,
        reverse: bool,
        top: TopTokens | None,
        entropy_gradient: bool,
        kept: KeptIds | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        log_probs, scratch = _log_softmax(logits, temperature, banned, kept)
        logprobs = log_probs.gather(-1, tokens[:, None]).squeeze(-1)
        kl = slope = None
        entropy = -torch.exp(log_probs, out=scratch).mul_(log_probs).sum(-1)
        if reference is not None:
            known = None
            if isinstance(reference, TopLogprobs):
                known, difference, slope = reference, *map(torch.empty_like, [log_probs] * 2)
            else:
                difference, slope = _log_softmax(reference, temperature, banned, kept)
                if top is not None:
                    known = top_logprobs(difference, log_probs, top=top, scratch=slope)
            if known is not None:
                with_bucket(known, log_probs, out=difference, scratch=slope)
            if reverse:
                torch.exp(log_probs, out=slope)
                kl = slope.mul_(difference.neg_().add_(log_probs)).sum(-1)
            else:
                torch.exp(difference, out=slope)
                kl = difference.sub_(log_probs).mul_(slope).sum(-1)
                slope.neg_()
        ctx.save_for_backward(log_probs, slope, tokens, temperature, banned)
        ctx.entropy_gradient, ctx.dtype = entropy_gradient, logits.dtype
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy, kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        log_probs, slope, tokens, temperature, banned = ctx.saved_tensors
        of_logprobs, of_entropy, of_kl = (None if g is None else g[:, None] for g in gradients)
        # the gradient of the log-probs, and then in its place that of the logits
        if slope is None:
            gradient = torch.zeros_like(log_probs)
        else:
            is_kept = torch._C._autograd._get_current_graph_task_keep_graph()
            gradient = torch.mul(slope, of_kl, out=None if is_kept else slope)
        if ctx.entropy_gradient:
            own = log_probs.exp()
            gradient.sub_(own * of_entropy).sub_((log_probs * of_entropy).mul_(own))
        gradient.scatter_add_(-1, tokens[:, None], of_logprobs)
        torch.ops.aten._log_softmax_backward_data.out(
            gradient, log_probs, -1, log_probs.dtype, out=gradient
        )
        gradient.index_fill_(-1, banned, 0.0).div_(temperature)
        return gradient.to(ctx.dtype), *(None for _ in range(8))


def top_logprobs(
    reference: Tensor, log_probs: Tensor, *, top: TopTokens, scratch: Tensor | None = None
) -> TopLogprobs:
    """Return the reference's log-probabilities of the top ids and of all others together.

    Args:
        reference: Log-probabilities `[tokens, vocab]`.
        log_probs: Log-probabilities of the distribution, likewise.
        top: The ids, of equally likely ones the lower.
        scratch: A tensor of the same shape to write on; None for a new one.
    """
    count = min(top.number, log_probs.shape[-1])
    ids = _most_likely(reference if top.of_reference else log_probs, count, scratch)
    others = _outside(reference, ids, scratch).clamp(min=_LEAST)
    return TopLogprobs(ids, torch.cat([reference.gather(-1, ids), others], dim=-1))


def with_bucket(
    reference: TopLogprobs,
    log_probs: Tensor,
    *,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """Spread the reference's probability outside the known ids as the distribution's own is spread.

    With p the distribution, q the reference, S the known ids and p_R, q_R the probabilities outside S, it is q in S and
    `q_R p / p_R` elsewhere. The divergences from it, and their gradients with it held constant, are those of the
    distributions over S and one more outcome for all other ids. Without that outcome a reverse divergence would fall
    as the distribution leaves S.

    Args:
        reference: Known log-probabilities of `[tokens]` distributions.
        log_probs: Log-probabilities of the distributions `[tokens, vocab]`.
        out: A tensor of that shape for the result; None for a new one.
        scratch: Another to write on; None for a new one.

    Returns:
        `[tokens, vocab]`.

    >>> known = TopLogprobs(torch.tensor([[0]]), torch.tensor([[0.5, 0.5]]).log())
    >>> with_bucket(known, torch.tensor([[0.5, 0.4, 0.1]]).log()).exp()
    tensor([[0.5000, 0.4000, 0.1000]])
    """
    ids, logprobs = reference.ids.long(), reference.logprobs.to(log_probs.dtype)
    shift = logprobs[:, -1:] - _outside(log_probs, ids, scratch).clamp(min=_LEAST_OWN)
    return torch.add(log_probs, shift, out=out).scatter_(-1, ids, logprobs[:, :-1])


def _most_likely(log_probs: Tensor, count: int, scratch: Tensor | None) -> Tensor:
    """Return the most likely ids, of equally likely ones the lower, int64 `[tokens, count]`.

    Of equally likely ids `topk` returns any, and others on a GPU than on a CPU.
    """
    values, ids = log_probs.topk(count)
    last = values[:, -1:]
    number = torch.arange(log_probs.shape[-1], dtype=log_probs.dtype, device=log_probs.device)
    equal = torch.where(log_probs == last, -number, number.new_tensor(-torch.inf), out=scratch)
    first = equal.topk(count).indices
    place = torch.arange(count, device=ids.device) - (values > last).sum(-1, keepdim=True)
    return torch.where(place < 0, ids, first.gather(-1, place.clamp(min=0)))


def _outside(log_probs: Tensor, ids: Tensor, scratch: Tensor | None) -> Tensor:
    """Return the log-probability of all other ids than these, `[tokens, 1]`; about `BANNED` where there is none."""
    others = torch.add(log_probs, 0.0, out=scratch).scatter_(-1, ids, BANNED)
    largest = others.amax(-1, keepdim=True)
    # a sum of probabilities would be 0 where the log-probs are below -103
    return others.sub_(largest).exp_().sum(-1, keepdim=True).log_().add_(largest)


def _log_softmax(
    logits: Tensor, temperature: Tensor, banned: Tensor, kept: KeptIds | None
) -> tuple[Tensor, Tensor]:
    """Return `log_distribution` and a tensor of the same shape to write on. The logits are overwritten."""
    scaled = logits.to(_computed(logits)).div_(temperature).index_fill_(-1, banned, BANNED)
    if kept is not None:
        # their gradient is 0, since their probability is
        kept.drop_others(scaled)
    return torch.log_softmax(scaled, dim=-1), scaled


def _computed(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def draw(log_probs: Tensor, uniforms: Tensor, *, greedy: Tensor | bool) -> Tensor:
    """Sample one token for each row by inverting the cumulative distribution.

    Args:
        log_probs: float32 `[rows, vocab]`.
        uniforms: float64 `[rows]` in [0, 1).
        greedy: Rows that take the most probable token, bool `[rows]`, or one for all rows.

    Returns:
        int64 `[rows]`.
    """
    if greedy is True:
        return log_probs.argmax(-1)
    probs = log_probs.exp()
    draw_one = _draw_large if probs.shape[-1] >= _LARGE else _draw_small
    # 1 - u lies in (0, 1]: a token of probability 0 is never the first to reach it
    sampled = draw_one(probs, (1.0 - uniforms)[:, None]).squeeze(-1)
    if greedy is False:
        return sampled
    return torch.where(greedy, log_probs.argmax(-1), sampled)


def _draw_small(probs: Tensor, fraction: Tensor) -> Tensor:
    """Return the first token at which the cumulative sum reaches a fraction of the total, int64 `[rows, 1]`."""
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    found = torch.searchsorted(cumulative, fraction * cumulative[:, -1:])
    return found.clamp_(max=probs.shape[-1] - 1)


def _draw_large(probs: Tensor, fraction: Tensor) -> Tensor:
    """Return the token of `_draw_small`, up to the rounding of the sums, from sums of blocks.

    A cumulative sum of a whole vocabulary in float64 takes a GPU as long as two layers of a model.
    """
    blocks = functional.pad(probs, (0, -probs.shape[-1] % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = fraction * ends[:, -1:]
    block = torch.searchsorted(ends, target).clamp_(max=ends.shape[-1] - 1)
    before = functional.pad(ends, (1, 0)).gather(-1, block)
    inside = blocks.take_along_dim(block[:, :, None], dim=1).squeeze(1)
    cumulative = inside.cumsum(-1, dtype=torch.float64)
    # the sums are rounded otherwise; the rest is above 0, and so is the probability of the token that reaches it
    rest = torch.minimum(target - before, cumulative[:, -1:])
    found = block * _BLOCK + torch.searchsorted(cumulative, rest)
    return found.clamp_(max=probs.shape[-1] - 1)
