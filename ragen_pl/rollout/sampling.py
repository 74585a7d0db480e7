"""Sampling the responses of one engine call, a column of tokens at a time.

What decides a token (`Draws`) and what has been sampled so far (`Responses`); models and caches are the
engine's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ragen_pl.models.distribution import draw, entropy, log_distribution
from ragen_pl.rollout.engine import Generation, GenerationRequest
from ragen_pl.seeding import uniforms


@dataclass(slots=True)
class SamplingParameters:
    """What decides each environment's next token beside the logits."""

    uniforms: Tensor  # float64 [rows, tokens]
    temperature: Tensor | float  # [rows, 1], or 1.0 for all
    greedy: Tensor  # bool [rows]
    banned: Tensor  # int64 [ids]

    @classmethod
    def of(
        cls, requests: Sequence[GenerationRequest], *, banned: Sequence[int], device: torch.device
    ) -> SamplingParameters:
        """Return what the requests ask for."""
        width = max(request.max_tokens for request in requests)
        draws = np.zeros((len(requests), width))
        for row, request in enumerate(requests):
            if request.temperature > 0:
                count = request.max_tokens
                draws[row, :count] = uniforms(request.seed, count=count)
        greedy = [request.temperature == 0 for request in requests]
        warmth = [request.temperature or 1.0 for request in requests]
        return cls(
            torch.from_numpy(draws).to(device),
            1.0
            if set(warmth) == {1.0}
            else torch.tensor(warmth, dtype=torch.float32, device=device)[:, None],
            torch.tensor(greedy, device=device),
            torch.tensor(banned, dtype=torch.int64, device=device),
        )

    def sample(self, logits: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return token, its log-prob and the distribution's entropy, each `[rows]`, of logits `[rows, vocab]`."""
        log_probs = log_distribution(logits, temperature=self.temperature, banned=self.banned)
        token = draw(log_probs, self.uniforms[:, step], greedy=self.greedy)
        return token, log_probs.gather(-1, token[:, None]).squeeze(-1), entropy(log_probs)

    def select(self, rows: Tensor) -> SamplingParameters:
        """Return the draws of these rows."""
        warmth = self.temperature if isinstance(self.temperature, float) else self.temperature[rows]
        return SamplingParameters(self.uniforms[rows], warmth, self.greedy[rows], self.banned)


class Responses:
    """The responses of one call.

    Args:
        limits: most tokens of each response.
        eos: ids that end a response.
    """

    def __init__(self, limits: Sequence[int], *, eos: Collection[int]) -> None:
        self.eos = frozenset(eos)
        self.limits = np.asarray(limits)
        self.length = np.zeros(len(limits), dtype=np.int64)  # 0 while a response goes on
        self.hit_length_limit = np.zeros(len(limits), dtype=bool)
        self._rows: list[np.ndarray] = []
        self._tokens: list[np.ndarray] = []
        self._figures: list[Tensor] = []  # log-probs and entropies, fetched once at the end

    def add(
        self, rows: np.ndarray, tokens: Tensor, logprobs: Tensor, entropies: Tensor
    ) -> np.ndarray:
        """Append a token to the responses `rows`; return bool `[rows]`, which of them go on.

        What is appended to a response that has ended is left out of it.
        """
        ids = tokens.cpu().numpy()
        self._rows.append(rows)
        self._tokens.append(ids)
        self._figures.append(torch.stack([logprobs, entropies]))
        count = len(self._tokens)
        ended = np.array([token in self.eos for token in ids.tolist()])
        going = self.length[rows] == 0
        done = going & (ended | (count >= self.limits[rows]))
        self.length[rows[done]] = count
        self.hit_length_limit[rows[done]] = ~ended[done]
        return going & ~done

    def generations(self, *, version: int) -> list[Generation]:
        """Return the finished responses, sampled with weights of this version."""
        rows = np.concatenate(self._rows)
        columns = np.repeat(np.arange(len(self._rows)), [len(part) for part in self._rows])
        shape = (len(self.length), len(self._rows))
        ids, metrics = np.zeros(shape, dtype=np.int64), np.zeros((2, *shape), dtype=np.float32)
        ids[rows, columns] = np.concatenate(self._tokens)
        metrics[:, rows, columns] = torch.cat(self._figures, dim=1).float().cpu().numpy()
        return [
            Generation(
                ids=ids[row, :length].copy(), logprobs=metrics[0, row, :length].copy(),
                entropy=float(metrics[1, row, :length].mean()), hit_length_limit=bool(self.hit_length_limit[row]),
                version=version,
            )
            for row, length in enumerate(self.length.tolist())
        ]  # fmt: skip
