"""The in-process rollout engine on transformers models.

It keeps the key-value cache of each session between turns, so that a turn computes only what is new:
the end of the last reply, the new observation, its pictures. Within a turn all lanes advance
together and lanes whose reply has ended are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ragen_pl.models.distribution import draw, entropy, log_distribution
from ragen_pl.rollout.engine import Generation, GenerationRequest
from ragen_pl.rollout.kv_cache import InPlaceCache

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle

_DROP_BELOW = 0.75  # finished lanes are dropped once the share of living ones falls under this


@dataclass(slots=True)
class _Lanes:
    """What is held of the sessions: row i of every tensor belongs to `sessions[i]`."""

    sessions: list[int]
    ids: list[np.ndarray]  # ids whose keys and values are held
    cache: InPlaceCache
    valid: Tensor  # bool [rows, slots]: slots that hold a token of the row, not padding
    count: Tensor  # int64 [rows]: tokens held, that is the next position


@dataclass(slots=True)
class _Replies:
    """The replies of one call, filled column by column."""

    ids: Tensor  # int64 [requests, tokens]
    logprobs: Tensor  # float32 [requests, tokens]
    entropies: Tensor  # float32 [requests, tokens]
    length: Tensor  # int64 [requests]; beyond the last column while the reply goes on
    cut: Tensor  # bool [requests]


class TransformersEngine:
    """Sample replies with a transformers model in this process.

    Args:
        bundle: the policy's model; its present weights are used, whatever changed them.
        forward_context: entered around the model's calls, such as the trainer's autocast.
    """

    def __init__(
        self,
        bundle: ModelBundle,
        *,
        forward_context: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.bundle = bundle
        self.forward_context = forward_context
        self.version = -1
        self.sampled_tokens = 0
        self.prefilled_tokens = 0
        self._lanes: _Lanes | None = None
        self._features: dict[int, tuple[np.ndarray, Tensor]] = {}

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.bundle.model.parameters()).device

    def sync_weights(self, version: int) -> None:
        """Void what was computed with older weights; the weights themselves are shared with the trainer."""
        self.version = version
        self.release()

    def release(self) -> None:
        """Forget all sessions."""
        self._lanes = None
        self._features.clear()

    @torch.inference_mode()
    def generate(self, requests: Sequence[GenerationRequest], *, keep: bool) -> list[Generation]:
        """Return a reply for each request; see `RolloutEngine`. The model must be in eval mode."""
        if self.bundle.model.training:
            raise RuntimeError(
                "the rollout engine needs the policy in eval mode; call policy.eval() first"
            )
        with self.forward_context():
            lanes = self._take_up(requests)
            hidden = self._prefill(lanes, requests)
            replies = self._decode(lanes, requests, hidden, keep=keep)
        generations = self._finish(requests, replies)
        if keep:
            self._settle(lanes, generations)
        self._lanes = lanes if keep else None
        return generations

    def _take_up(self, requests: Sequence[GenerationRequest]) -> _Lanes:
        """Return lanes for the requests' sessions, those of the last call where it kept them all."""
        sessions, held = [request.session for request in requests], self._lanes
        if held is None or not set(sessions) <= set(held.sessions):
            rows, device = len(sessions), self.device
            return _Lanes(
                sessions, [np.zeros(0, np.int64)] * rows, InPlaceCache(),
                torch.zeros(rows, 0, dtype=torch.bool, device=device),
                torch.zeros(rows, dtype=torch.int64, device=device),
            )  # fmt: skip
        if held.sessions == sessions:
            return held
        numbers = {session: row for row, session in enumerate(held.sessions)}
        rows_held = [numbers[session] for session in sessions]
        select = torch.tensor(rows_held, device=held.count.device)
        ids = [held.ids[row] for row in rows_held]
        return _Lanes(
            sessions, ids, held.cache.select(select), held.valid[select], held.count[select]
        )

    def _prefill(self, lanes: _Lanes, requests: Sequence[GenerationRequest]) -> Tensor:
        """Compute what is new in each prompt; return the last hidden state `[rows, hidden]`."""
        fresh = []
        for row, request in enumerate(requests):
            known, prompt = lanes.ids[row], request.prompt.ids
            if len(known) and not (
                len(prompt) > len(known) and np.array_equal(prompt[: len(known)], known)
            ):
                lanes.valid[row], lanes.count[row], known = False, 0, known[:0]
            fresh.append(prompt[len(known) :])
            lanes.ids[row] = prompt
        width = max(len(ids) for ids in fresh)
        self.prefilled_tokens += sum(len(ids) for ids in fresh)
        padded = np.full((len(fresh), width), self.bundle.pad_token_id, dtype=np.int64)
        real = np.zeros((len(fresh), width), dtype=bool)
        for row, ids in enumerate(fresh):  # on the left, so that every row ends in the last column
            padded[row, width - len(ids) :], real[row, width - len(ids) :] = ids, True
        real_t = torch.from_numpy(real).to(lanes.count.device)
        positions = (lanes.count[:, None] + real_t.cumsum(1) - 1).clamp_(min=0)
        embeds = self._embed(
            torch.from_numpy(padded).to(real_t.device), [r.prompt.images for r in requests], fresh
        )
        hidden = self._forward(lanes, embeds, positions, real_t)
        return hidden[:, -1]

    def _embed(
        self, ids: Tensor, images: Sequence[Sequence[np.ndarray]], fresh: Sequence[np.ndarray]
    ) -> Tensor:
        embeds = self.bundle.model.get_input_embeddings()(ids)
        slot = self.bundle.image_token_id
        if slot is None:
            return embeds
        new_images: list[np.ndarray] = []
        for row_images, row_ids in zip(images, fresh, strict=True):
            slots, taken = int((row_ids == slot).sum()), len(row_images)
            while slots > 0:
                taken -= 1
                slots -= self.bundle.num_image_tokens(row_images[taken])
            new_images.extend(row_images[taken:])
        if new_images:
            features = torch.cat(self._encode(new_images)).to(embeds.dtype)
            embeds = embeds.masked_scatter((ids == slot).unsqueeze(-1), features)
        return embeds

    def _encode(self, images: Sequence[np.ndarray]) -> list[Tensor]:
        """Return each picture's features `[tokens, hidden]`, computing every array only once."""
        unknown = {id(image): image for image in images if id(image) not in self._features}
        if unknown:
            pixels = self.bundle.pixel_values(list(unknown.values())).to(self.device)
            for image, features in zip(unknown.values(), self.bundle.features(pixels), strict=True):
                self._features[id(image)] = (
                    image,
                    features,
                )  # the array is held so that its id stays its own
        return [self._features[id(image)][1] for image in images]

    def _forward(self, lanes: _Lanes, embeds: Tensor, positions: Tensor, real: Tensor) -> Tensor:
        """Run the decoder on `[rows, new]` tokens and append them to the lanes' caches."""
        past, new = lanes.valid, embeds.shape[1]
        lanes.valid = torch.cat([past, real], dim=1)
        # without padding the decoder's own causal rule is right for a first prefill and for one token
        plain = bool(lanes.valid.all()) and (new == 1 or past.shape[1] == 0)
        output = self.bundle.decoder(
            inputs_embeds=embeds,
            attention_mask=None if plain else _causal_mask(lanes.valid, new),
            position_ids=positions,
            past_key_values=lanes.cache,
            use_cache=True,
        )
        lanes.count = lanes.count + real.sum(1)
        return output.last_hidden_state

    def _decode(
        self, lanes: _Lanes, requests: Sequence[GenerationRequest], hidden: Tensor, *, keep: bool
    ) -> _Replies:
        device, width = hidden.device, max(request.max_tokens for request in requests)
        limits = torch.tensor([request.max_tokens for request in requests], device=device)
        temperature = torch.tensor([[request.temperature] for request in requests], device=device)
        greedy = temperature[:, 0] == 0
        temperature = temperature.masked_fill(temperature == 0, 1.0)
        uniforms = torch.from_numpy(
            np.stack([_padded(request.uniforms, width) for request in requests])
        ).to(device)
        banned = torch.tensor(self.bundle.banned_token_ids, device=device)
        eos = torch.tensor(sorted(self.bundle.eos_token_ids), device=device)
        shape = (len(requests), width)
        replies = _Replies(
            torch.zeros(shape, dtype=torch.int64, device=device), torch.zeros(shape, device=device),
            torch.zeros(shape, device=device), torch.full((len(requests),), width + 1, device=device),
            torch.zeros(len(requests), dtype=torch.bool, device=device),
        )  # fmt: skip
        branch, rows, merged = lanes, torch.arange(len(requests), device=device), lanes.cache.length
        unit = bool((temperature == 1).all())
        for step in range(width):
            logits = self.bundle.lm_head(hidden)
            log_probs = log_distribution(
                logits, temperature=1.0 if unit else temperature[rows], banned=banned
            )
            token = draw(log_probs, uniforms[rows, step], greedy=greedy[rows])
            replies.ids[rows, step] = token
            replies.logprobs[rows, step] = log_probs.gather(-1, token[:, None]).squeeze(-1)
            replies.entropies[rows, step] = entropy(log_probs)
            ended = torch.isin(token, eos)
            over = ended | (step + 1 >= limits[rows])
            going = replies.length[rows] > width
            replies.cut[rows] |= going & over & ~ended
            replies.length[rows] = torch.where(going & over, step + 1, replies.length[rows])
            alive = going & ~over
            living = int(alive.sum())
            if living == 0:
                break
            if living < _DROP_BELOW * len(rows):
                if keep and branch is not lanes:
                    lanes.cache.merge(branch.cache, rows, merged)
                index = alive.nonzero().squeeze(-1)
                merged = branch.cache.length
                rows, token = rows[index], token[index]
                branch = _Lanes(
                    [], [], branch.cache.select(index), branch.valid[index], branch.count[index]
                )
                if not keep:
                    lanes.cache = branch.cache  # the other rows' memory is free from here on
            embeds = self.bundle.model.get_input_embeddings()(token[:, None])
            real = torch.ones(embeds.shape[:2], dtype=torch.bool, device=device)
            hidden = self._forward(branch, embeds, branch.count[:, None], real)
            hidden = hidden[:, -1]
        if keep and branch is not lanes:
            lanes.cache.merge(branch.cache, rows, merged)
        return replies

    def _finish(self, requests: Sequence[GenerationRequest], replies: _Replies) -> list[Generation]:
        ids, logprobs = replies.ids.cpu().numpy(), replies.logprobs.cpu().numpy()
        entropies, lengths = replies.entropies.cpu().numpy(), replies.length.tolist()
        cuts = replies.cut.tolist()
        self.sampled_tokens += sum(lengths)
        return [
            Generation(
                ids=ids[row, :length].copy(), logprobs=logprobs[row, :length].copy(),
                entropy=float(entropies[row, :length].mean()), cut=cuts[row],
            )
            for row, length in enumerate(lengths)
        ]  # fmt: skip

    def _settle(self, lanes: _Lanes, generations: Sequence[Generation]) -> None:
        """Mark what the cache holds of each row: its prompt and its reply but for the last token."""
        slots = lanes.cache.length
        started = slots - (max(len(generation.ids) for generation in generations) - 1)
        valid = torch.zeros(len(generations), slots, dtype=torch.bool, device=lanes.count.device)
        valid[:, :started] = lanes.valid[:, :started]
        held = torch.tensor(
            [len(generation.ids) - 1 for generation in generations], device=valid.device
        )
        valid[:, started:] = torch.arange(slots - started, device=valid.device) < held[:, None]
        lanes.valid, lanes.count = valid, valid.sum(1)
        lanes.ids = [
            np.concatenate([ids, generation.ids[:-1]])
            for ids, generation in zip(lanes.ids, generations, strict=True)
        ]


def _causal_mask(valid: Tensor, new: int) -> Tensor:
    """Return bool `[rows, 1, new, slots]`: valid earlier slots and itself, so that padding stays finite."""
    slots = valid.shape[1]
    if new == 1:
        return valid[:, None, None, :]
    query = torch.arange(slots - new, slots, device=valid.device)[:, None]
    key = torch.arange(slots, device=valid.device)[None, :]
    return (valid[:, None, None, :] & (key <= query)) | (key == query)


def _padded(uniforms: np.ndarray, width: int) -> np.ndarray:
    return np.pad(uniforms[:width], (0, max(0, width - len(uniforms))))
