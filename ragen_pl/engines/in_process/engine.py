"""The in-process rollout engine on transformers models.

It keeps each session's keys and values between turns. A turn computes only the new ids: the end of the last response
and the new observation with its images. All responses of a call advance together, one token at a time, and finished
rows are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count
from ragen_pl.engines.in_process.decoding import Batch, GrowingBatch
from ragen_pl.engines.in_process.kv_cache import InPlaceCache, SessionCache, StateCache
from ragen_pl.engines.in_process.memory import (
    PREFILL_TOKENS,
    SessionBytes,
    empty_cache,
    rounded_rows,
    rounded_slots,
    sampling_bytes,
)
from ragen_pl.engines.in_process.rules import InProcessRules, no_masks
from ragen_pl.engines.in_process.sampling import Responses, SamplingParameters
from ragen_pl.engines.protocol import (
    EngineMemory,
    EnginePolicy,
    Generation,
    GenerationRequest,
    Prompt,
    RolloutSizes,
)
from ragen_pl.models.facts import ModelFacts
from ragen_pl.models.image_features import ImageFeatures
from ragen_pl.models.images import HELD_BYTES, bytes_of, content_key
from ragen_pl.models.inputs import (
    DecoderInputs,
    continued_inputs,
    run_decoder,
    shown_patches,
)
from ragen_pl.models.value_head import StateCritic

if TYPE_CHECKING:
    from ragen_pl.engines.in_process.static_step import StaticStep

# shortest common prefix of all prompts, in tokens, that is computed once for all
_SHARE_FROM = 16
# tokens that are sampled on a GPU before the host reads them
_TOKENS_PER_READ = 8


class TransformersEngine(InProcessRules):
    """Rollout engine that runs a transformers model in this process.

    Args:
        policy: Policy whose model is used in place, with the weights that it has at each call.
        forward_context: Context around the model's forward passes, such as the trainer's autocast.
        prefill_tokens: Positions of a forward pass over prompts, padding included; one prompt may have more.
        cache_bytes: Largest size of the keys and values. Responses that need more are sampled one part after the
            other, and no session is kept. None for no limit.
        tokens_per_read: Tokens of each response that are sampled before the host reads them, which waits for the
            device. What a response samples after its end is dropped, and finished responses leave the batch only then.
            Truncated sampling reads every token. None for 8 on a GPU and 1 elsewhere.
        static_step: Whether tokens are sampled by a step of fixed shapes, which a GPU replays as a CUDA graph. Keys and
            values then have room for rounded numbers of responses and tokens. None for GPUs, and models that can.

    Raises:
        ValueError: The model's attention takes no masks, which padded prompts need, or its step has no fixed shape.
    """

    needs_trust = ()

    @checked
    def __init__(
        self,
        policy: EnginePolicy,
        *,
        forward_context: Callable[[], AbstractContextManager[object]] = nullcontext,
        prefill_tokens: Count = PREFILL_TOKENS,
        cache_bytes: Count | None = None,
        tokens_per_read: Count | None = None,
        static_step: bool | None = None,
    ) -> None:
        self.bundle = policy.bundle
        if not self.bundle.facts.custom_masks:
            raise ValueError(no_masks("model.build.attn_implementation"))
        problem = static_problem(self.bundle.facts)
        if static_step and problem:
            raise ValueError(f"rollout.engine.static_step=true: {problem}; set null")
        self.forward_context = forward_context
        self.prefill_tokens = prefill_tokens
        self.cache_bytes = cache_bytes
        self.tokens_per_read = tokens_per_read
        self._static_wanted = problem is None if static_step is None else static_step
        self._static_everywhere = bool(static_step)
        self._static: StaticStep | None = None
        self._critic: StateCritic | None = None
        self.version = -1
        self.sampled_tokens = 0
        self.prefilled_tokens = 0
        self._pending: list[GenerationRequest] = []
        self._keep = False
        self._held: SessionCache | None = None
        self._features: dict[bytes, ImageFeatures] = {}

    @classmethod
    def planned_memory(cls, settings: Mapping[str, Any], sizes: RolloutSizes) -> EngineMemory:
        """Return the bytes of sampling, and of the weights where the engine has a copy of them."""
        copied = super().planned_memory(settings, sizes)
        wanted = settings.get("static_step")
        if wanted is None:
            wanted = sizes.on_gpu and static_problem(sizes.bundle.facts) is None
        sampling = sampling_bytes(
            sizes,
            prefill_tokens=settings.get("prefill_tokens", PREFILL_TOKENS),
            cache_bytes=settings.get("cache_bytes"),
            static=wanted,
        )
        return EngineMemory(sampling | copied.rollout, copied.update)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the model's weights."""
        return self.bundle.model.dtype

    @property
    def held_bytes(self) -> int:
        """Bytes of keys, values and states held for the next turns."""
        return 0 if self._held is None else self._held.cache.memory_bytes()

    @property
    def static_bytes(self) -> int:
        """Bytes of the static step's keys and values, which are there until `sleep`."""
        return 0 if self._static is None else self._static.cache.memory_bytes()

    @property
    def graphs(self) -> int:
        """Number of CUDA graphs, which are there until `sleep`."""
        return 0 if self._static is None else self._static.graphs

    @property
    def held_images(self) -> int:
        """Number of images whose features are held."""
        return len(self._features)

    def load_weights(self, version: int) -> None:
        """Drop keys, values and features of older weights; the weights themselves are the trainer's."""
        self.version = version
        self.release()

    def read_values(self, critic: StateCritic | None) -> None:
        """Fill in the values of all later responses; see `ReadsValues`."""
        self._critic = critic

    def release(self) -> None:
        """Forget all sessions and pending requests."""
        self._pending, self._keep = [], False
        self._held = None
        self._features.clear()

    def sleep(self) -> None:
        """Free the cache of the sessions, and the buffers and graphs of the static step."""
        self.release()
        if self._static is not None:
            self._static.free()

    def close(self) -> None:
        """Free all that `sleep` frees."""
        self.sleep()

    def submit(self, requests: Sequence[GenerationRequest], *, keep: bool) -> None:
        """Queue requests; see `RolloutEngine`."""
        self._pending.extend(requests)
        self._keep = self._keep or keep

    def collect(self, *, wait: bool = True) -> list[tuple[int, Generation]]:
        """Sample all pending responses together. The model must be in eval mode."""
        requests, keep = self._pending, self._keep
        self._pending, self._keep = [], False
        if not requests:
            return []
        if self.bundle.model.training:
            raise RuntimeError(
                "the rollout engine needs the policy in eval mode; call policy.eval() first"
            )
        parts = self._parts(requests)
        # a state can't continue after padding, and a part would displace the sessions of another
        keep = keep and len(parts) == 1 and not self.bundle.facts.keeps_states
        generations = [self._generate(part, keep=keep) for part in parts]
        sessions = [request.session for request in requests]
        return list(zip(sessions, chain.from_iterable(generations), strict=True))

    def _parts(self, requests: list[GenerationRequest]) -> list[list[GenerationRequest]]:
        """Split requests into parts whose keys and values fit into `cache_bytes`."""
        if self.cache_bytes is None:
            return [requests]
        slots = _slots(requests)
        static = self._is_static(self.bundle.device)
        size = self.session_bytes(rounded_slots(slots) if static else slots)
        rows = max(1, self.cache_bytes // size)
        while static and rounded_rows(rows) * size > self.cache_bytes and rows > 1:
            rows -= 1
        return [requests[start : start + rows] for start in range(0, len(requests), rows)]

    def session_bytes(self, tokens: int) -> int:
        """Return the bytes of the keys, values and states of a session."""
        return self._session_bytes.of(tokens)

    @cached_property
    def _session_bytes(self) -> SessionBytes:
        return SessionBytes.measured(self.bundle, self.forward_context)

    @torch.inference_mode()
    def _generate(self, requests: Sequence[GenerationRequest], *, keep: bool) -> list[Generation]:
        prompts = [request.prompt.ids for request in requests]
        with self.forward_context(), _without_cudnn_attention():
            held = self._sessions(requests)
            if not self.bundle.facts.keeps_states and held.cache.length == 0:
                self._prefill_shared(held, prompts)
            hidden = self._prefill(held, requests)
            responses = self._decode(held, requests, hidden, keep=keep)
        generations = responses.generations(version=self.version)
        self.sampled_tokens += sum(len(generation.ids) for generation in generations)
        if keep:
            held.commit(prompts, [generation.ids for generation in generations])
        self._held = held if keep else None
        return generations

    def _sessions(self, requests: Sequence[GenerationRequest]) -> SessionCache:
        """Return the cache of the requests' sessions, an empty one if one of them is new."""
        sessions, device = [request.session for request in requests], self.bundle.device
        # a static cache is changed in place
        held, self._held = self._held, None
        if held is not None and set(sessions) <= set(held.sessions):
            return held.select(sessions)
        if self._is_static(device):
            cache = self._static_step().begin(rows=len(sessions), slots=_slots(requests))
            return SessionCache.empty(sessions, device=device, cache=cache)
        return SessionCache.empty(sessions, device=device, cache=empty_cache(self.bundle))

    def _is_static(self, device: torch.device) -> bool:
        return self._static_everywhere or (self._static_wanted and device.type == "cuda")

    def _static_step(self) -> StaticStep:
        """Return the step of fixed shapes, which is imported and made at its first use."""
        if self._static is None:
            from ragen_pl.engines.in_process.static_step import StaticStep

            self._static = StaticStep(self.bundle, anticipates=self.cache_bytes is None)
        return self._static

    def _prefill_shared(self, held: SessionCache, prompts: Sequence[np.ndarray]) -> None:
        """Compute the common prefix of all prompts once, such as an environment's rules."""
        # each prompt keeps a token of its own
        first, longest = prompts[0], min(len(ids) for ids in prompts) - 1
        rows = [ids[:longest] == first[:longest] for ids in prompts]
        image = first[: longest + 1] == self.bundle.image_token_id
        begins = image[1:] & self.bundle.facts.token_begins_image
        alike = np.all([*rows, ~image[:-1], ~begins], axis=0)
        shared = longest if alike.all() else int(alike.argmin())
        if len(prompts) == 1 or shared < _SHARE_FROM:
            return
        inputs, _, _ = continued_inputs(
            self.bundle,
            [first[:shared]],
            valid=held.valid[:1],
            next_position=held.next_position[:1],
            features=None,
        )
        self._last_states(held.cache, inputs)
        self.prefilled_tokens += shared
        held.share(first[:shared])

    def _prefill(self, held: SessionCache, requests: Sequence[GenerationRequest]) -> Tensor:
        """Compute the new ids of each prompt; return the last hidden states, `[rows, hidden]`."""
        prompts = [request.prompt for request in requests]
        new_ids = held.new_ids([prompt.ids for prompt in prompts])
        self.prefilled_tokens += sum(len(ids) for ids in new_ids)
        inputs, held.valid, held.next_position = continued_inputs(
            self.bundle,
            new_ids,
            valid=held.valid,
            next_position=held.next_position,
            features=self._new_features(prompts, new_ids),
        )
        limit = max(request.max_tokens for request in requests)
        held.cache.reserve(held.valid.shape[1] + limit)
        return self._states_by_part(held.cache, inputs)

    def _states_by_part(self, cache: InPlaceCache | StateCache, inputs: DecoderInputs) -> Tensor:
        """Return the states at the last column, `[rows, hidden]`, computed for a part of the rows at a time."""
        count, width = inputs.ids.shape
        step = max(1, self.prefill_tokens // width)
        if step >= count or isinstance(cache, StateCache):
            return self._last_states(cache, inputs)
        states: list[Tensor] = []
        for start in range(0, count, step):
            part = slice(start, min(start + step, count))
            with cache.only(part, total_rows=count):
                rows = inputs.rows(part, image_token_id=self.bundle.image_token_id)
                states.append(self._last_states(cache, rows))
        return torch.cat(states)

    def _new_features(
        self, prompts: Sequence[Prompt], new_ids: Sequence[np.ndarray]
    ) -> ImageFeatures | None:
        """Return the features of the image tokens in the new ids."""
        image_token = self.bundle.image_token_id
        if image_token is None:
            return None
        images: list[np.ndarray] = []
        shown: list[np.ndarray] = []
        for prompt, ids in zip(prompts, new_ids, strict=True):
            patches = shown_patches(self.bundle, prompt.images, prompt.patches)
            slots, first = int((ids == image_token).sum()), len(patches)
            while slots > 0:
                first -= 1
                slots -= len(patches[first])
            images.extend(prompt.images[first:])
            shown.extend(patches[first:])
        return self._encode(images, shown) if images else None

    def _encode(self, images: Sequence[np.ndarray], shown: Sequence[np.ndarray]) -> ImageFeatures:
        """Return the features of the patches shown of each image; images of equal content are encoded once."""
        assert self.bundle.images is not None
        keys = [content_key(image) for image in images]
        if sum(map(bytes_of, self._features.values())) > HELD_BYTES:
            # a copy, which keeps nothing of the images that were encoded with it
            kept = self._features.keys() & set(keys)
            self._features = {key: self._features[key].select([0], [None]) for key in kept}
        new = {
            key: image for key, image in zip(keys, images, strict=True) if key not in self._features
        }
        if new:
            features = self.bundle.images.encode(list(new.values()))
            self._features |= dict(zip(new, features.split(), strict=True))
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        distinct = ImageFeatures.join([self._features[key] for key in numbers])
        return distinct.select([numbers[key] for key in keys], shown)

    def _last_states(self, cache: InPlaceCache | StateCache, inputs: DecoderInputs) -> Tensor:
        """Append inputs to the cache; return the decoder's states at their last column, `[rows, hidden]`."""
        last = inputs.ids.shape[1] - 1
        states = run_decoder(
            self.bundle, inputs, cache=cache, first=last, shared_slots=cache.shared_slots
        )
        return states[:, 0]

    def _decode(
        self,
        held: SessionCache,
        requests: Sequence[GenerationRequest],
        hidden: Tensor,
        *,
        keep: bool,
    ) -> Responses:
        """Sample the responses; `hidden` are the states of the prompts' last tokens, `[rows, hidden]`."""
        bundle, device = self.bundle, hidden.device
        sampling = SamplingParameters.of(requests, banned=bundle.banned(device))
        limits = [request.max_tokens for request in requests]
        responses = Responses(limits, eos=bundle.eos_token_ids)
        last, slots = max(limits) - 1, held.valid.shape[1]
        batch: Batch
        if self._static is not None and held.cache is self._static.cache:
            from ragen_pl.engines.in_process.static_step import StaticBatch

            self._static.critic = self._critic
            batch = StaticBatch(self._static, held, sampling, limit=max(limits), keep=keep)
        else:
            batch = GrowingBatch(
                bundle, held, sampling, limit=max(limits), keep=keep, critic=self._critic
            )
        # the ids that a token is truncated to are of any number: none waits on the device
        per_read = 1 if sampling.truncations else self._tokens_per_read(device)
        for step in range(max(limits)):
            sampled = batch.first(hidden) if step == 0 else batch.next(step)
            responses.add(batch.rows, sampled)
            if step < last and (step + 1) % per_read:
                continue
            unfinished = responses.read()
            if not unfinished.any():
                break
            batch.drop(unfinished)
        batch.end()
        if keep:
            assert isinstance(held.cache, InPlaceCache)
            # a response's last token is not fed to the model
            held.cache.use(slots + int(responses.length.max()) - 1)
        return responses

    def _tokens_per_read(self, device: torch.device) -> int:
        """Return the number of tokens that are sampled before the host reads them."""
        return self.tokens_per_read or (_TOKENS_PER_READ if device.type == "cuda" else 1)


def static_problem(facts: ModelFacts) -> str | None:
    """Return why a model's step can't have fixed shapes, None if it can."""
    if facts.keeps_states:
        return f"the layers of {facts.family} keep states, which only its own cache serves"
    if facts.has_experts:
        return f"{facts.family} has experts, and how many tokens each gets varies"
    if facts.rotates_by_length:
        return f"the rotary embeddings of {facts.family} change with the length"
    return None


def _slots(requests: Sequence[GenerationRequest]) -> int:
    """Return the slots of a row: prompts end in one column, and the longest response begins there."""
    return max(len(request.prompt.ids) for request in requests) + max(
        request.max_tokens for request in requests
    )


@contextmanager
def _without_cudnn_attention() -> Iterator[None]:
    """Attend by other kernels: cuDNN makes a plan for each new number of keys, in each layer at each token."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)
