"""Truncated sampling: top-p, top-k and min-p, in the engine and in the trainer.

A truncated policy samples from its distribution over the ids that it keeps, renormalized. With K the kept ids of a
state and p the distribution after temperature and bans::

    log q(a) = log p(a) - log sum_{i in K} p(i)    for a in K

The update trains q with K held fixed at what was sampled from: "keep sampling mask" of DeepSeek-V3.2 (2025, arXiv
2512.02556, section 3.1). Old and new policy then have the same actions, the ratio at unchanged weights is 1, and the
score function has mean 0 under q, which that of p has not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count, FractionBelowOne, PositiveFraction

# log-prob of an id that is not sampled; finite: 0 · log 0 is then 0 and not NaN in entropies and divergences
BANNED = -1e30
# relative: how far an engine's limit between kept and dropped ids may lie from the trainer's
_SLACK = 1e-3
# tokens whose vocabulary is sorted at a time
_ROWS = 64


@checked
@dataclass(frozen=True, kw_only=True)
class Truncation:
    """Most probable ids that sampling keeps, at least one.

    Applied after temperature and bans, in vLLM's order: `min_p`, then `top_k`, then `top_p` of what they leave.

    Attributes:
        top_p: Smallest set of the most probable ids with at least this probability (Holtzman et al., 2020); 1 for all.
        top_k: Number of the most probable ids (Fan et al., 2018), and those as probable as the last of them; None for
            all.
        min_p: Least probability, as a fraction of that of the most probable id (Nguyen et al., 2024); 0 for all.
    """

    top_p: PositiveFraction = 1.0
    top_k: Count | None = None
    min_p: FractionBelowOne = 0.0

    def __bool__(self) -> bool:
        """Whether any id may be dropped."""
        return self.top_p < 1.0 or self.top_k is not None or self.min_p > 0.0

    def limits(self) -> dict[str, float | int]:
        """Return the attributes that are not the default, by name.

        Examples:
            >>> Truncation(top_p=0.9).limits()
            {'top_p': 0.9}
        """
        values = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}

    def counts(self, probabilities: Tensor, *, slack: float = 0.0) -> Tensor:
        """Return the number of ids that are kept, int64 `[rows]`.

        Args:
            probabilities: `[rows, vocab]`, in descending order.
            slack: Relative change of the limits, above 0 for more ids.
        """
        kept = probabilities > 0.0
        if self.min_p > 0.0:
            kept &= probabilities >= self.min_p * (1.0 - slack) * probabilities[:, :1]
        if self.top_k is not None and self.top_k < probabilities.shape[1]:
            kept &= probabilities >= probabilities[:, self.top_k - 1, None]
        if self.top_p < 1.0:
            considered = torch.where(kept, probabilities, 0.0).double()
            before = considered.cumsum(-1) - considered
            limit = min(1.0, self.top_p * (1.0 + slack))
            kept &= before < limit * considered.sum(-1, keepdim=True)
        return kept.sum(-1).clamp_(min=1)

    def truncated(self, log_probs: Tensor) -> Tensor:
        """Return the log-probs of the truncated distribution, `[rows, vocab]`, finite for dropped ids too.

        Args:
            log_probs: `[rows, vocab]` after temperature and bans.

        Examples:
            >>> Truncation(top_k=2).truncated(torch.tensor([[0.5, 0.3, 0.2]]).log()).exp()
            tensor([[0.6250, 0.3750, 0.0000]])
        """
        parts = [self._truncated(part) for part in log_probs.split(_ROWS)]
        return torch.cat(parts) if parts else log_probs

    def _truncated(self, log_probs: Tensor) -> Tensor:
        ordered, ids = log_probs.exp().sort(dim=-1, descending=True, stable=True)
        places = torch.arange(ordered.shape[1], device=ordered.device)
        dropped = places >= self.counts(ordered)[:, None]
        dropped = torch.zeros_like(dropped).scatter_(-1, ids, dropped)
        return torch.log_softmax(log_probs.masked_fill(dropped, BANNED), dim=-1)

    def kept_by_engine(
        self, log_probs: Tensor, tokens: Tensor, rollout_logprobs: Tensor
    ) -> KeptIds:
        """Return the ids that an engine kept when it sampled these tokens, the tokens among them.

        Engine and trainer round otherwise, so an id at the limit may be kept by one and dropped by the other. Of the
        sets within a small distance of the trainer's own limit, the one is taken whose probability is nearest to
        `p(token) / q(token)`, with q the engine's probability.

        Args:
            log_probs: `[tokens, vocab]` after temperature and bans.
            tokens: int64 `[tokens]`, sampled ids.
            rollout_logprobs: `[tokens]`, the engine's log-probs; NaN for a token that was not sampled, which keeps all.
        """
        parts = [
            self._kept_by_engine(*part)
            for part in zip(
                *(each.split(_ROWS) for each in (log_probs, tokens, rollout_logprobs)), strict=True
            )
        ]
        return KeptIds.join(parts) if parts else KeptIds.all_of(0, device=log_probs.device)

    def _kept_by_engine(
        self, log_probs: Tensor, tokens: Tensor, rollout_logprobs: Tensor
    ) -> KeptIds:
        ordered, ids = log_probs.exp().sort(dim=-1, descending=True, stable=True)
        places = torch.arange(ordered.shape[1], device=ordered.device)
        min_kept = self.counts(ordered, slack=-_SLACK)[:, None]
        max_kept = self.counts(ordered, slack=_SLACK)[:, None]
        # an id as probable as the last one may have taken its place
        min_kept = (ordered > ordered.gather(-1, min_kept - 1) * (1.0 + _SLACK)).sum(
            -1, keepdim=True
        )
        max_kept = (ordered >= ordered.gather(-1, max_kept - 1) * (1.0 - _SLACK)).sum(
            -1, keepdim=True
        )
        own = (ids == tokens[:, None]).int().argmax(-1, keepdim=True)
        token = ordered.gather(-1, own).double()
        # probability of the first ids and the token, by the number of these ids less one
        mass = ordered.cumsum(-1, dtype=torch.float64) + torch.where(places < own, token, 0.0)
        wanted = token.log() - rollout_logprobs.double()[:, None]
        # infinite where the trainer's probability of the token is 0
        distance = (mass.log() - wanted).abs().nan_to_num(posinf=torch.finfo(torch.float64).max)
        possible = (places >= min_kept.clamp(min=1) - 1) & (places < max_kept)
        last = distance.masked_fill_(~possible, torch.inf).argmin(-1, keepdim=True)
        inside = ((places <= last) | (places == own)) & ~rollout_logprobs.isnan()[:, None]
        return KeptIds(ids=ids[inside].int(), ends=inside.sum(-1).cumsum(0))


@dataclass(slots=True)
class KeptIds:
    """Ids that sampling kept at each token.

    A worked example of three tokens: the first keeps the ids 4 and 7, the second all, the third 5::

        ids   4 7 5
        ends  2 2 3
    """

    ids: Tensor
    """int32 `[kept]`, those of each token after those of the one before; none where all are kept."""
    ends: Tensor
    """int64 `[tokens]`, number of the ids up to each token."""

    @classmethod
    def all_of(cls, tokens: int, *, device: torch.device) -> KeptIds:
        """Return that so many tokens keep all ids."""
        none = torch.zeros(0, dtype=torch.int32, device=device)
        return cls(none, torch.zeros(tokens, dtype=torch.int64, device=device))

    @classmethod
    def join(cls, parts: Sequence[KeptIds]) -> KeptIds:
        """Return the tokens of several parts, one part after the other."""
        counts = torch.cat([part.counts for part in parts])
        return cls(torch.cat([part.ids for part in parts]), counts.cumsum(0))

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def counts(self) -> Tensor:
        """Number of ids of each token, 0 for all; int64 `[tokens]`."""
        return self.ends.diff(prepend=self.ends.new_zeros(1))

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.ids.nbytes + self.ends.nbytes

    def select(self, index: Tensor) -> KeptIds:
        """Return the tokens of these numbers, int64 `[selected]`."""
        index = index.to(self.ends.device)
        counts = self.counts[index]
        ends = counts.cumsum(0)
        first = (self.ends[index] - counts) - (ends - counts)
        places = torch.arange(int(counts.sum()), device=index.device)
        return KeptIds(self.ids[places + first.repeat_interleave(counts)], ends)

    def split(self, size: int) -> list[KeptIds]:
        """Return parts of so many tokens, the last one with the rest."""
        parts, first = [], 0
        for ends in self.ends.split(size):
            last = int(ends[-1]) if len(ends) else first
            parts.append(KeptIds(self.ids[first:last], ends - first))
            first = last
        return parts

    def to(self, device: torch.device) -> KeptIds:
        """Return them on a device."""
        return KeptIds(self.ids.to(device), self.ends.to(device))

    def drop_others(self, logits: Tensor) -> Tensor:
        """Overwrite the logits `[tokens, vocab]` of all other ids by those of banned ids, and return them."""
        counts = self.counts
        rows = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        places = (rows, self.ids.long())
        kept = logits[places]
        logits.masked_fill_((counts > 0)[:, None], BANNED)
        logits[places] = kept
        return logits
