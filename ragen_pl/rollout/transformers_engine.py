"""The in-process rollout engine on transformers models.

It keeps the key-value cache of each session between turns, so that a turn computes only what is new:
the end of the last response, the new observation, its images. Within a turn all environments advance
together and environments whose response has ended are dropped.
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

from ragen_pl.rollout.engine import EnginePolicy, Generation, GenerationRequest, Prompt
from ragen_pl.rollout.kv_cache import InPlaceCache
from ragen_pl.rollout.leave_out import shown_patches
from ragen_pl.rollout.sampling import Responses, SamplingParameters

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle

_SHARE_FROM = 16  # tokens that prompts must have in common for that to be computed once for all
_DROP_BELOW = (
    0.75  # finished environments are dropped once the share of living ones falls under this
)


@dataclass(slots=True)
class _HeldRows:
    """What is held of the sessions: row i of every tensor belongs to `sessions[i]`."""

    sessions: list[int]
    ids: list[np.ndarray]  # ids whose keys and values are held
    cache: InPlaceCache
    valid: Tensor  # bool [rows, slots]: slots that hold a token of the row, not padding
    count: Tensor  # int64 [rows]: tokens held, that is the next position


class TransformersEngine:
    """Sample responses with a transformers model in this process.

    Args:
        policy: Policy whose model is used in place, with the weights that it has at each call.
        forward_context: Context around the model's forward passes, such as the trainer's autocast.
    """

    def __init__(
        self,
        policy: EnginePolicy,
        *,
        forward_context: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.bundle: ModelBundle = policy.bundle
        self.forward_context = forward_context
        self.version = -1
        self.sampled_tokens = 0
        self.prefilled_tokens = 0
        self._pending: list[GenerationRequest] = []
        self._keep = False
        self._held: _HeldRows | None = None
        self._features: dict[int, tuple[np.ndarray, Tensor]] = {}

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.bundle.model.parameters()).device

    def load_weights(self, version: int) -> None:
        """Void what was computed with older weights; the weights themselves are shared with the trainer."""
        self.version = version
        self.release()

    def release(self) -> None:
        """Forget all sessions and what is pending."""
        self._pending, self._keep = [], False
        self._held = None
        self._features.clear()

    def close(self) -> None:
        """Free what the sessions hold; the model is the trainer's."""
        self.release()

    def submit(self, requests: Sequence[GenerationRequest], *, keep: bool) -> None:
        """Queue requests; see `RolloutEngine`."""
        self._pending.extend(requests)
        self._keep = self._keep or keep

    def collect(self) -> list[tuple[int, Generation]]:
        """Sample all pending responses together. The model must be in eval mode."""
        requests, keep = self._pending, self._keep
        self._pending, self._keep = [], False
        if not requests:
            return []
        generations = self._generate(requests, keep=keep)
        sessions = [request.session for request in requests]
        return list(zip(sessions, generations, strict=True))

    @torch.inference_mode()
    def _generate(self, requests: Sequence[GenerationRequest], *, keep: bool) -> list[Generation]:
        if self.bundle.model.training:
            raise RuntimeError(
                "the rollout engine needs the policy in eval mode; call policy.eval() first"
            )
        with self.forward_context():
            held_rows = self._take_up(requests)
            if held_rows.cache.length == 0:
                self._prefill_shared(held_rows, requests)
            hidden = self._prefill(held_rows, requests)
            responses = self._decode(held_rows, requests, hidden, keep=keep)
        generations = responses.generations(version=self.version)
        self.sampled_tokens += sum(len(generation.ids) for generation in generations)
        if keep:
            self._settle(held_rows, generations)
        self._held = held_rows if keep else None
        return generations

    def _take_up(self, requests: Sequence[GenerationRequest]) -> _HeldRows:
        """Return environments for the requests' sessions, those of the last call where it kept them all."""
        sessions, held = [request.session for request in requests], self._held
        if held is None or not set(sessions) <= set(held.sessions):
            rows, device = len(sessions), self.device
            return _HeldRows(
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
        return _HeldRows(
            sessions, ids, held.cache.select(select), held.valid[select], held.count[select]
        )

    def _prefill_shared(self, held_rows: _HeldRows, requests: Sequence[GenerationRequest]) -> None:
        """Compute what all prompts begin with, such as the rules of an environment, once for all new environments."""
        prompts, slot = [request.prompt.ids for request in requests], self.bundle.image_token_id
        # each prompt keeps a token of its own
        first, most = prompts[0], min(len(ids) for ids in prompts) - 1
        alike = np.all(
            [ids[:most] == first[:most] for ids in prompts] + [first[:most] != slot], axis=0
        )
        shared = most if alike.all() else int(alike.argmin())
        if len(prompts) == 1 or shared < _SHARE_FROM:
            return
        device = held_rows.count.device
        ids, positions = torch.from_numpy(first[:shared]).to(device)[None], torch.arange(shared)
        self._forward(held_rows.cache, self.bundle.embed(ids), positions.to(device)[None], None)
        self.prefilled_tokens += shared
        held_rows.cache = held_rows.cache.select(torch.zeros_like(held_rows.count))
        held_rows.ids = [first[:shared]] * len(prompts)
        held_rows.valid = torch.ones(len(prompts), shared, dtype=torch.bool, device=device)
        held_rows.count = held_rows.count + shared

    def _prefill(self, held_rows: _HeldRows, requests: Sequence[GenerationRequest]) -> Tensor:
        """Compute what is new in each prompt; return the last hidden state `[rows, hidden]`."""
        fresh = []
        for row, request in enumerate(requests):
            known, prompt = held_rows.ids[row], request.prompt.ids
            if len(known) and not (
                len(prompt) > len(known) and np.array_equal(prompt[: len(known)], known)
            ):
                held_rows.valid[row], held_rows.count[row], known = False, 0, known[:0]
            fresh.append(prompt[len(known) :])
            held_rows.ids[row] = prompt
        width = max(len(ids) for ids in fresh)
        self.prefilled_tokens += sum(len(ids) for ids in fresh)
        padded = np.full((len(fresh), width), self.bundle.pad_token_id, dtype=np.int64)
        real = np.zeros((len(fresh), width), dtype=bool)
        for row, ids in enumerate(fresh):  # on the left, so that every row ends in the last column
            padded[row, width - len(ids) :], real[row, width - len(ids) :] = ids, True
        real_t = torch.from_numpy(real).to(held_rows.count.device)
        positions = (held_rows.count[:, None] + real_t.cumsum(1) - 1).clamp_(min=0)
        embeds = self._embed(
            torch.from_numpy(padded).to(real_t.device), [r.prompt for r in requests], fresh
        )
        past = held_rows.valid.shape[1]
        held_rows.valid = torch.cat([held_rows.valid, real_t], dim=1)
        held_rows.count = held_rows.count + real_t.sum(1)
        # without padding the decoder's own causal rule is right for a first prefill
        plain = past == 0 and bool(real_t.all())
        mask = None if plain else _causal_mask(held_rows.valid, width)
        return self._forward(held_rows.cache, embeds, positions, mask)

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
        """Return each image's features `[tokens, hidden]`, computing every array only once."""
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
        self,
        held_rows: _HeldRows,
        requests: Sequence[GenerationRequest],
        hidden: Tensor,
        *,
        keep: bool,
    ) -> Responses:
        """Sample the responses; finished environments are dropped in a copy of the caches."""
        bundle, device = self.bundle, hidden.device
        draws = SamplingParameters.of(requests, banned=bundle.banned_token_ids, device=device)
        limits = [request.max_tokens for request in requests]
        responses = Responses(limits, eos=bundle.eos_token_ids)
        rows, embed = np.arange(len(requests)), bundle.model.get_input_embeddings()
        cache, positions, merged = held_rows.cache, held_rows.count[:, None], held_rows.cache.length
        # while every slot holds a token of its row, one new token needs no mask
        plain = bool(held_rows.valid.all())
        seen = None if plain else functional.pad(held_rows.valid, (0, max(limits)), value=True)
        for step in range(max(limits)):
            token, *metrics = draws.sample(bundle.lm_head(hidden), step)
            going = responses.add(rows, token, *metrics)
            living = int(going.sum())
            if living == 0:
                break
            if living < _DROP_BELOW * len(rows):
                if keep and cache is not held_rows.cache:
                    held_rows.cache.merge(cache, torch.from_numpy(rows).to(device), merged)
                index, rows = torch.from_numpy(going.nonzero()[0]).to(device), rows[going]
                merged, cache = cache.length, cache.select(index)
                draws, token, positions = draws.select(index), token[index], positions[index]
                seen = None if seen is None else seen[index]
                if not keep:
                    held_rows.cache = cache  # the other rows' memory is free from here on
            mask = None if seen is None else seen[:, None, None, : cache.length + 1]
            hidden = self._forward(cache, embed(token[:, None]), positions, mask)
            positions = positions + 1
        if keep and cache is not held_rows.cache:
            held_rows.cache.merge(cache, torch.from_numpy(rows).to(device), merged)
        return responses

    def _settle(self, held_rows: _HeldRows, generations: Sequence[Generation]) -> None:
        """Mark what the cache holds of each row: its prompt and its response but for the last token."""
        slots, started = held_rows.cache.length, held_rows.valid.shape[1]
        valid = torch.zeros(
            len(generations), slots, dtype=torch.bool, device=held_rows.count.device
        )
        valid[:, :started] = held_rows.valid
        held = torch.tensor(
            [len(generation.ids) - 1 for generation in generations], device=valid.device
        )
        valid[:, started:] = torch.arange(slots - started, device=valid.device) < held[:, None]
        held_rows.valid, held_rows.count = valid, valid.sum(1)
        held_rows.ids = [
            np.concatenate([ids, generation.ids[:-1]])
            for ids, generation in zip(held_rows.ids, generations, strict=True)
        ]


def _causal_mask(valid: Tensor, new: int) -> Tensor:
    """Return bool `[rows, 1, new, slots]`: valid earlier slots and itself, so that padding stays finite."""
    slots = valid.shape[1]
    query = torch.arange(slots - new, slots, device=valid.device)[:, None]
    key = torch.arange(slots, device=valid.device)[None, :]
    return (valid[:, None, None, :] & (key <= query)) | (key == query)
