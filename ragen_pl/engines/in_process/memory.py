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
FEWEST_ROWS = 8
"""Rows below which a static step takes as long with fewer."""
FEWEST_SLOTS = 256
"""Slots that a static step reads at least, and by which they grow at least."""
# log-probs and probabilities of a token, and their sums in float64
_TOKEN_BYTES = 4 + 4 + 8


def rounded_rows(rows: int) -> int:
    """Return the rows of a static step that samples so many: a power of two, or 1.5 times one.

    Examples:
        >>> [rounded_rows(rows) for rows in (1, 5, 8, 33, 49, 64)]
        [1, 6, 8, 48, 64, 64]
    """
    above = 1 << (rows - 1).bit_length()
    return above * 3 // 4 if above > 2 and rows <= above * 3 // 4 else above


def rounded_slots(slots: int) -> int:
    """Return the slots that a static step reads where so many are needed, at most a quarter or 255 more.

    Examples:
        >>> [rounded_slots(slots) for slots in (10, 600, 2100)]
        [256, 768, 2560]
    """
    step = max(FEWEST_SLOTS, (1 << (slots.bit_length() - 1)) // 4)
    return -(-slots // step) * step


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
    sizes: RolloutSizes, *, prefill_tokens: int, cache_bytes: int | None, static: bool
) -> dict[str, int]:
    """Return the bytes that sampling takes at its peak, by part.

    `activations` are those of the largest forward pass over prompts. `keys and values` have room for the longest
    conversation of each episode. When responses end, the others are copied, which takes `DROP_BELOW` once more. A
    static step moves them inside buffers of rounded sizes, one layer at a time, and its graphs have memory of their own
    for the head.

    Args:
        sizes: Sizes of the rollout.
        prefill_tokens: As in `TransformersEngine`.
        cache_bytes: As in `TransformersEngine`.
        static: Whether tokens are sampled by a static step.
    """
    bundle, episodes = sizes.bundle, sizes.episodes
    slots = sizes.prompt + sizes.response
    slots = rounded_slots(slots) if static else slots
    session = SessionBytes.measured(bundle, sizes.forward_context).of(slots)
    if cache_bytes is not None:
        episodes = max(1, min(episodes, cache_bytes // session))
    rows = max(1, min(episodes, prefill_tokens // sizes.prompt))
    vocabulary = bundle.logit_count
    image_tokens = sum(bundle.num_image_tokens(image) for image in sizes.images)
    held = episodes * (1 + DROP_BELOW)
    if static:
        held = rounded_rows(episodes) * (1 + 1 / len(bundle.layers))
    return {
        "activations": sizes.prefill_bytes(rows),
        "keys and values": int(held * session),
        "head": (1 + static) * episodes * vocabulary * _TOKEN_BYTES,
        "images": episodes * image_tokens * bundle.hidden_size * bundle.model.dtype.itemsize,
    }
