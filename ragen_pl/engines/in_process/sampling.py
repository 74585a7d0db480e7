"""Sampling the responses of one engine call, one column of tokens at a time.

Holds the parameters that decide a token and the responses so far. Models and caches belong to the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ragen_pl.base.seeding import uniforms
from ragen_pl.engines.protocol import Generation, GenerationRequest
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.distribution import draw, entropy, log_distribution
from ragen_pl.models.truncation import BANNED, Truncation
from ragen_pl.models.value_head import StateCritic


class Sampled(NamedTuple):
    """A token of each row of a batch, on the device."""

    tokens: Tensor
    """int64 `[rows]`."""
    logprobs: Tensor
    """`[rows]`."""
    entropies: Tensor
    """Of the distributions, `[rows]`."""
    kept: Tensor | None
    """bool `[rows, vocab]`, ids that a row is truncated to, none in a row that keeps all; None without truncation."""
    values: Tensor | None = None
    """float32 `[rows]`, a critic's values of the states that the tokens are sampled in; None without a critic."""

    def each(self, change: Callable[[Tensor], Tensor]) -> Sampled:
        """Return them changed, tensor by tensor."""
        tokens, logprobs, entropies, *others = self
        kept, values = (each if each is None else change(each) for each in others)
        return Sampled(change(tokens), change(logprobs), change(entropies), kept, values)


@dataclass(slots=True)
class SamplingParameters:
    """Sampling parameters and random numbers of the rows of a batch."""

    uniforms: Tensor
    """float64 `[rows, tokens]`."""
    temperature: Tensor | float
    """float32 `[rows, 1]`, or 1.0 for all rows."""
    greedy: Tensor | bool
    """bool `[rows]`, or one for all rows."""
    banned: Tensor
    """int64, ids that are never sampled."""
    truncations: tuple[tuple[Truncation, Tensor], ...] = ()
    """Truncations, and the rows that are sampled with each, bool `[rows]`."""

    @classmethod
    def of(cls, requests: Sequence[GenerationRequest], *, banned: Tensor) -> SamplingParameters:
        """Return the parameters of requests, one row for each.

        Args:
            requests: Requests; the seed of each decides its uniforms.
            banned: int64, ids that are never sampled.
        """
        device = banned.device
        draws = np.zeros((len(requests), max(request.max_tokens for request in requests)))
        for row, request in enumerate(requests):
            if request.temperature > 0:
                count = request.max_tokens
                draws[row, :count] = uniforms(request.seed, count=count)
        greedy = [request.temperature == 0 for request in requests]
        # the log-probs of a greedy response are those at temperature 1
        temperatures = [request.temperature or 1.0 for request in requests]
        per_row = torch.tensor(temperatures, dtype=torch.float32, device=device)[:, None]
        return cls(
            uniforms=torch.from_numpy(draws).to(device),
            temperature=1.0 if set(temperatures) == {1.0} else per_row,
            greedy=greedy[0] if len(set(greedy)) == 1 else torch.tensor(greedy, device=device),
            banned=banned,
            truncations=_truncations(requests, device),
        )

    def sample_in(
        self, hidden: Tensor, uniforms: Tensor, *, bundle: ModelBundle, critic: StateCritic | None
    ) -> Sampled:
        """Sample a token of each row in a state, and read the critic's value of the state.

        Args:
            hidden: `[rows, hidden]`, the decoder's states at the tokens before.
            uniforms: float64 `[rows]`.
            bundle: Model with the head.
            critic: Critic; None for no values.
        """
        sampled = self.sample(bundle.lm_head(hidden), uniforms)
        return sampled if critic is None else sampled._replace(values=critic.read(hidden))

    def sample(self, logits: Tensor, uniforms: Tensor) -> Sampled:
        """Sample a token of each row. Nothing is read from the device.

        Args:
            logits: `[rows, vocab]`.
            uniforms: float64 `[rows]`.
        """
        log_probs = log_distribution(logits, temperature=self.temperature, banned=self.banned)
        kept = None
        for truncation, rows in self.truncations:
            of_row = rows[:, None]
            log_probs = torch.where(of_row, truncation.truncated(log_probs), log_probs)
            inside = (log_probs > BANNED / 2) & of_row
            kept = inside if kept is None else kept | inside
        tokens = draw(log_probs, uniforms, greedy=self.greedy)
        own = log_probs.gather(-1, tokens[:, None]).squeeze(-1)
        return Sampled(tokens, own, entropy(log_probs), kept)

    def select(self, rows: Tensor) -> SamplingParameters:
        """Return the parameters of these rows."""
        temperature = self.temperature
        if not isinstance(temperature, float):
            temperature = temperature[rows]
        return SamplingParameters(
            uniforms=self.uniforms[rows],
            temperature=temperature,
            greedy=self.greedy if isinstance(self.greedy, bool) else self.greedy[rows],
            banned=self.banned,
            truncations=tuple((each, own[rows]) for each, own in self.truncations),
        )


def _truncations(
    requests: Sequence[GenerationRequest], device: torch.device
) -> tuple[tuple[Truncation, Tensor], ...]:
    """Return each truncation of the requests with its rows; greedy responses have none."""
    of_row = [request.truncation if request.temperature > 0 else None for request in requests]
    return tuple(
        (each, torch.tensor([own == each for own in of_row], device=device))
        for each in dict.fromkeys(of_row)
        if each
    )


class Responses:
    """The responses of one engine call. What is sampled stays on the device until `read`.

    Args:
        limits: Length limit of each response.
        eos: Ids that end a response.
    """

    def __init__(self, limits: Sequence[int], *, eos: Collection[int]) -> None:
        self.eos = np.array(sorted(eos), dtype=np.int64)
        self.limits = np.asarray(limits)
        # 0 until the response is finished
        self.length = np.zeros(len(limits), dtype=np.int64)
        self.hit_length_limit = np.zeros(len(limits), dtype=bool)
        self._rows: list[np.ndarray] = []
        self._tokens: list[np.ndarray] = []
        # log-probs, entropies and values stay on the device until the end
        self._statistics: list[Tensor] = []
        # of the tokens since the last read
        self._unread: list[tuple[Tensor, Tensor | None]] = []
        # of each response, by the number of the token
        self._kept: list[list[np.ndarray]] | None = None

    def add(self, rows: np.ndarray, sampled: Sampled) -> None:
        """Append a token to the responses `rows`; tokens of finished responses are dropped later.

        The rows are the same from one `read` to the next.
        """
        self._rows.append(rows)
        self._unread.append((sampled.tokens, sampled.kept))
        statistics = (sampled.logprobs, sampled.entropies, sampled.values)
        self._statistics.append(torch.stack([each for each in statistics if each is not None]))

    def read(self) -> np.ndarray:
        """Read the tokens that were added since the last read: the only time that the host waits for the device.

        Returns:
            bool `[rows]`, the responses that are not finished.
        """
        ids = torch.stack([tokens for tokens, _ in self._unread]).cpu().numpy()
        kept = [inside for _, inside in self._unread]
        self._unread = []
        rows, ends = self._rows[-1], (ids[..., None] == self.eos).any(-1)
        for tokens, ended, inside in zip(ids, ends, kept, strict=True):
            self._tokens.append(tokens)
            if inside is not None:
                self._add_kept(rows, inside)
            count = len(self._tokens)
            done = (self.length[rows] == 0) & (ended | (count >= self.limits[rows]))
            self.length[rows[done]] = count
            self.hit_length_limit[rows[done]] = ~ended[done]
        unfinished: np.ndarray = self.length[rows] == 0
        return unfinished

    def _add_kept(self, rows: np.ndarray, inside: Tensor) -> None:
        """Append the ids that each row of `[rows, vocab]` is truncated to."""
        ids = inside.nonzero()[:, 1].to(torch.int32).cpu().numpy()
        counts = inside.sum(dim=1, dtype=torch.int32).cpu().numpy()
        if self._kept is None:
            self._kept = [[] for _ in self.limits]
        for row, ids_of_row in zip(rows.tolist(), np.split(ids, counts.cumsum()[:-1]), strict=True):
            # not those of finished responses
            if self.length[row] == 0:
                self._kept[row].append(ids_of_row)

    def generations(self, *, version: int) -> list[Generation]:
        """Return the finished responses.

        Args:
            version: Version of the weights that sampled them.
        """
        rows = np.concatenate(self._rows)
        columns = np.repeat(np.arange(len(self._rows)), [len(ids) for ids in self._tokens])
        shape = (len(self.length), len(self._rows))
        ids = np.zeros(shape, dtype=np.int64)
        ids[rows, columns] = np.concatenate(self._tokens)
        of_tokens = torch.cat(self._statistics, dim=1).float().cpu().numpy()
        statistics = np.zeros((len(of_tokens), *shape), dtype=np.float32)
        statistics[:, rows, columns] = of_tokens
        return [
            Generation(
                ids=ids[row, :length].copy(),
                logprobs=statistics[0, row, :length].copy(),
                entropy=float(statistics[1, row, :length].mean()),
                hit_length_limit=bool(self.hit_length_limit[row]),
                version=version,
                values=statistics[2, row, :length].copy() if len(statistics) > 2 else None,
                **self._kept_of(row),
            )
            for row, length in enumerate(self.length.tolist())
        ]

    def _kept_of(self, row: int) -> dict[str, np.ndarray]:
        """Return a response's `kept_ids` and `kept_counts`, empty where no response is truncated."""
        if self._kept is None:
            return {}
        kept = self._kept[row]
        counts = np.array([len(ids) for ids in kept], dtype=np.int32)
        return {"kept_ids": np.concatenate(kept), "kept_counts": counts}
