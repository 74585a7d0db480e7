"""Memory of the in-process engine: what a session holds, and what sampling takes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ragen_pl.engines.in_process.kv_cache import InPlaceCache, StateCache
from ragen_pl.models.inputs import DecoderInputs, run_decoder

if TYPE_CHECKING:
    from ragen_pl.engines.protocol import RolloutSizes
    from ragen_pl.models.bundle import ModelBundle

PREFILL_TOKENS = 16_384
"""Positions of a forward pass over prompts."""
DROP_BELOW = 0.75
"""Finished rows are dropped when the share of unfinished rows falls below this."""
# log-probs and probabilities of a token, and their sums in float64
_TOKEN_BYTES = 4 + 4 + 8


@dataclass(frozen=True, slots=True)
class SessionBytes:
    """Bytes of the keys, values and states of a session, which grow evenly with its tokens.

    Attributes:
        one: Those of one token.
        two: Those of two.
    """

    one: int
    two: int

    @classmethod
    def measured(
        cls, bundle: ModelBundle, forward_context: Callable[[], AbstractContextManager[object]]
    ) -> SessionBytes:
        """Return those of a model, measured by forward passes."""

        def size(tokens: int) -> int:
            cache = empty_cache(bundle)
            cache.reserve(tokens)
            with torch.inference_mode(), forward_context():
                ids = torch.full((1, tokens), bundle.pad_token_id, device=bundle.device)
                run_decoder(bundle, DecoderInputs(ids=ids), cache=cache)
            return cache.memory_bytes()

        return cls(size(1), size(2))

    def of(self, tokens: int) -> int:
        """Return the bytes of a session with this number of tokens."""
        return self.one + (tokens - 1) * (self.two - self.one)


def empty_cache(bundle: ModelBundle) -> InPlaceCache | StateCache:
    """Return a cache of a model without any session."""
    if bundle.facts.keeps_states:
        return StateCache(bundle.model.config.get_text_config())
    return InPlaceCache()


def sampling_bytes(
    sizes: RolloutSizes, *, prefill_tokens: int, cache_bytes: int | None
) -> dict[str, int]:
    """Return the bytes that sampling takes at its peak, by part.

    `activations` are those of the largest forward pass over prompts. `keys and values` have room for the longest
    conversation of each episode. When responses end, the others are copied, which takes `DROP_BELOW` once more.

    Args:
        sizes: Sizes of the rollout.
        prefill_tokens: As in `TransformersEngine`.
        cache_bytes: As in `TransformersEngine`.
    """
    bundle, episodes = sizes.bundle, sizes.episodes
    session = SessionBytes.measured(bundle, sizes.forward_context).of(sizes.prompt + sizes.response)
    if cache_bytes is not None:
        episodes = max(1, min(episodes, cache_bytes // session))
    rows = max(1, min(episodes, prefill_tokens // sizes.prompt))
    vocabulary = bundle.logit_count
    image_tokens = sum(bundle.num_image_tokens(image) for image in sizes.images)
    return {
        "activations": sizes.prefill_bytes(rows),
        "keys and values": int((1 + DROP_BELOW) * episodes * session),
        "head": episodes * vocabulary * _TOKEN_BYTES,
        "images": episodes * image_tokens * bundle.hidden_size * bundle.model.dtype.itemsize,
    }
