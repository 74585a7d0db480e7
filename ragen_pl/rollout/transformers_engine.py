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
from torch.nn import functional

from ragen_pl.rollout.engine import Generation, GenerationRequest, Prompt
from ragen_pl.rollout.kv_cache import InPlaceCache
from ragen_pl.rollout.leave_out import shown_patches
from ragen_pl.rollout.sampling import Draws, Replies

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle

_SHARE_FROM = 16  # tokens that prompts must have in common for that to be computed once for all
_DROP_BELOW = 0.75  # finished lanes are dropped once the share of living ones falls under this


@dataclass(slots=True)
class _Lanes:
    """What is held of the sessions: row i of every tensor belongs to `sessions[i]`."""

    sessions: list[int]
    ids: list[np.ndarray]  # ids whose keys and values are held
    cache: InPlaceCache
    valid: Tensor  # bool [rows, slots]: slots that hold a token of the row, not padding
    count: Tensor  # int64 [rows]: tokens held, that is the next position


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
            if lanes.cache.length == 0:
                self._prefill_shared(lanes, requests)
            hidden = self._prefill(lanes, requests)
            generations = self._decode(lanes, requests, hidden, keep=keep).generations()
        self.sampled_tokens += sum(len(generation.ids) for generation in generations)
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

    def _prefill_shared(self, lanes: _Lanes, requests: Sequence[GenerationRequest]) -> None:
        """Compute what all prompts begin with, such as the rules of a world, once for all new lanes."""
        prompts, slot = [request.prompt.ids for request in requests], self.bundle.image_token_id
        # each prompt keeps a token of its own
        first, most = prompts[0], min(len(ids) for ids in prompts) - 1
        alike = np.all(
            [ids[:most] == first[:most] for ids in prompts] + [first[:most] != slot], axis=0
        )
        shared = most if alike.all() else int(alike.argmin())
        if len(prompts) == 1 or shared < _SHARE_FROM:
            return
        device = lanes.count.device
        ids, positions = torch.from_numpy(first[:shared]).to(device)[None], torch.arange(shared)
        self._forward(lanes.cache, self.bundle.embed(ids), positions.to(device)[None], None)
        self.prefilled_tokens += shared
        lanes.cache = lanes.cache.select(torch.zeros_like(lanes.count))
        lanes.ids = [first[:shared]] * len(prompts)
        lanes.valid = torch.ones(len(prompts), shared, dtype=torch.bool, device=device)
        lanes.count = lanes.count + shared

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
            torch.from_numpy(padded).to(real_t.device), [r.prompt for r in requests], fresh
        )
        past = lanes.valid.shape[1]
        lanes.valid = torch.cat([lanes.valid, real_t], dim=1)
        lanes.count = lanes.count + real_t.sum(1)
        # without padding the decoder's own causal rule is right for a first prefill
        plain = past == 0 and bool(real_t.all())
        mask = None if plain else _causal_mask(lanes.valid, width)
        return self._forward(lanes.cache, embeds, positions, mask)

    def _embed(self, ids: Tensor, prompts: Sequence[Prompt], fresh: Sequence[np.ndarray]) -> Tensor:
        slot = self.bundle.image_token_id
        if slot is None:
            return self.bundle.embed(ids)
        new_images: list[np.ndarray] = []
        new_patches: list[np.ndarray] = []
        for prompt, row_ids in zip(prompts, fresh, strict=True):
            patches = shown_patches(self.bundle, prompt)
            slots, taken = int((row_ids == slot).sum()), len(patches)
            while slots > 0:
                taken -= 1
                slots -= len(patches[taken])
            new_images.extend(prompt.images[taken:])
            new_patches.extend(patches[taken:])
        if not new_images:
            return self.bundle.embed(ids)
        found = [
            whole if len(part) == len(whole) else whole[torch.from_numpy(part).to(ids.device)]
            for whole, part in zip(self._encode(new_images), new_patches, strict=True)
        ]
        return self.bundle.embed(ids, torch.cat(found))

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

    def _forward(
        self, cache: InPlaceCache, embeds: Tensor, positions: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Run the decoder on `[rows, new]` tokens, appended to the cache; return its last states `[rows, hidden]`."""
        if mask is not None and self.bundle.adds_masks:
            mask = torch.where(mask, 0.0, torch.finfo(embeds.dtype).min).to(embeds.dtype)
        output = self.bundle.decoder(
            inputs_embeds=embeds, attention_mask=mask, position_ids=positions,
            past_key_values=cache, use_cache=True,
        )  # fmt: skip
        last: Tensor = output.last_hidden_state[:, -1]
        return last

    def _decode(
        self, lanes: _Lanes, requests: Sequence[GenerationRequest], hidden: Tensor, *, keep: bool
    ) -> Replies:
        """Sample the replies; finished lanes are dropped in a copy of the caches."""
        bundle, device = self.bundle, hidden.device
        draws = Draws.of(requests, banned=bundle.banned_token_ids, device=device)
        limits = [request.max_tokens for request in requests]
        replies = Replies(limits, eos=bundle.eos_token_ids)
        rows, embed = np.arange(len(requests)), bundle.model.get_input_embeddings()
        cache, positions, merged = lanes.cache, lanes.count[:, None], lanes.cache.length
        # while every slot holds a token of its row, one new token needs no mask
        plain = bool(lanes.valid.all())
        seen = None if plain else functional.pad(lanes.valid, (0, max(limits)), value=True)
        for step in range(max(limits)):
            token, *figures = draws.sample(bundle.lm_head(hidden), step)
            going = replies.add(rows, token, *figures)
            living = int(going.sum())
            if living == 0:
                break
            if living < _DROP_BELOW * len(rows):
                if keep and cache is not lanes.cache:
                    lanes.cache.merge(cache, torch.from_numpy(rows).to(device), merged)
                index, rows = torch.from_numpy(going.nonzero()[0]).to(device), rows[going]
                merged, cache = cache.length, cache.select(index)
                draws, token, positions = draws.select(index), token[index], positions[index]
                seen = None if seen is None else seen[index]
                if not keep:
                    lanes.cache = cache  # the other rows' memory is free from here on
            mask = None if seen is None else seen[:, None, None, : cache.length + 1]
            hidden = self._forward(cache, embed(token[:, None]), positions, mask)
            positions = positions + 1
        if keep and cache is not lanes.cache:
            lanes.cache.merge(cache, torch.from_numpy(rows).to(device), merged)
        return replies

    def _settle(self, lanes: _Lanes, generations: Sequence[Generation]) -> None:
        """Mark what the cache holds of each row: its prompt and its reply but for the last token."""
        slots, started = lanes.cache.length, lanes.valid.shape[1]
        valid = torch.zeros(len(generations), slots, dtype=torch.bool, device=lanes.count.device)
        valid[:, :started] = lanes.valid
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
    query = torch.arange(slots - new, slots, device=valid.device)[:, None]
    key = torch.arange(slots, device=valid.device)[None, :]
    return (valid[:, None, None, :] & (key <= query)) | (key == query)
