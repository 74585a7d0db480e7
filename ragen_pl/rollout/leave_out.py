"""What is left out of a context before a response is sampled: patches and old turns that matter little.

The policy looks once at everything: it gives its greedy response, and each part of the prompt is scored by how much
the response's probabilities change without it (occlusion; Zeiler and Fergus, 2014). No randomness enters. What scored
lowest is left out; the response that counts is sampled from the rest, and trained on with the same rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ragen_pl.models.distribution import log_distribution
from ragen_pl.rollout.engine import GenerationRequest, Prompt, RolloutEngine, generate

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle

_ROWS = 128  # sequences scored at once


@dataclass(frozen=True, kw_only=True)
class LeaveOut:
    """Shares of what is shown that are left out.

    Attributes:
        patches: of each new image's patches; they stay out for the rest of the episode.
        turns: of the old turns in the window, chosen anew for every response; the present one always stays.
    """

    patches: float = 0.0
    turns: float = 0.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("patches", "turns"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"context.leave_out.{name}={getattr(self, name)}: expected at least 0 and below 1; "
                    "0 leaves nothing out"
                )

    def __bool__(self) -> bool:
        return self.patches > 0 or self.turns > 0

    def thin(
        self, ids: np.ndarray, scores: np.ndarray, *, slot: int | None, patches: Sequence[int]
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Leave the patches that score lowest out of a turn's ids; of equal ones the later.

        Args:
            ids: int64 `[turn]`, all patches shown.
            scores: `[turn]`, read at the image slots.
            slot: id of an image slot.
            patches: of each image of the turn.

        Returns:
            The ids that are left, and of each image the patches that are shown, in order.
        """
        places, shown, keep = np.flatnonzero(ids == slot), [], np.ones(len(ids), dtype=bool)
        for own in np.split(places, np.cumsum(patches)[:-1]) if len(patches) else []:
            count = len(own) - math.floor(self.patches * len(own) + 1e-9)
            best = np.sort(np.argsort(-scores[own], kind="stable")[:count])
            keep[own], keep[own[best]] = False, True
            shown.append(best)
        return ids[keep], shown

    def turns_out(self, scores: Sequence[float]) -> frozenset[int]:
        """Return which old turns are left out, those that score lowest; of equal ones the older.

        Args:
            scores: of the old turns in the window, oldest first.
        """
        count = math.floor(self.turns * len(scores) + 1e-9)
        return frozenset(np.argsort(np.asarray(scores), kind="stable")[:count].tolist())


def look(
    bundle: ModelBundle,
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    parts: Sequence[Sequence[np.ndarray]],
    *,
    max_tokens: int,
) -> list[np.ndarray]:
    """Score parts of prompts by how far the policy's greedy response depends on them.

    The score of a part is the sum over the response's tokens of KL(all shown ‖ the part left out), in nats. The
    engine's sessions are forgotten.

    Args:
        bundle: the policy.
        engine: gives the greedy responses.
        prompts: with everything shown.
        parts: of each prompt, each the positions (int64) that would be left out together.
        max_tokens: longest response.

    Returns:
        float64 `[parts]` for each prompt.
    """
    requests = [
        GenerationRequest(
            session=number, prompt=prompt, max_tokens=max_tokens, temperature=0.0, seed=0
        )
        for number, prompt in enumerate(prompts)
    ]
    responses = [generation.ids for generation in generate(engine, requests, keep=False)]
    # validation may run in inference mode already; nothing here takes a gradient
    with torch.inference_mode():
        return [_dependence(bundle, *each) for each in zip(prompts, responses, parts, strict=True)]


def _dependence(
    bundle: ModelBundle, prompt: Prompt, response: np.ndarray, parts: Sequence[np.ndarray]
) -> np.ndarray:
    if not parts:
        return np.zeros(0)
    embeds = _embedded(bundle, prompt, response)
    everywhere = np.arange(len(embeds))
    kept = [everywhere, *(np.delete(everywhere, part) for part in parts)]
    lengths = torch.tensor([len(one) for one in kept], device=embeds.device)
    rows = torch.zeros(len(kept), len(embeds), embeds.shape[1], device=embeds.device)
    rows = rows.to(embeds.dtype)
    for row, places in enumerate(kept):
        rows[row, : len(places)] = embeds[torch.from_numpy(places).to(embeds.device)]
    states = torch.cat(
        [
            bundle.decoder(inputs_embeds=some, use_cache=False).last_hidden_state
            for some in rows.split(_ROWS)
        ]
    )
    # the response ends every row; the state before a token predicts it
    back = torch.arange(len(response), 0, -1, device=embeds.device)
    columns = lengths[:, None] - back[None, :] - 1
    predicting = states[torch.arange(len(kept), device=embeds.device)[:, None], columns]
    banned = torch.tensor(bundle.banned_token_ids, dtype=torch.int64, device=embeds.device)
    log_probs = log_distribution(bundle.lm_head(predicting), banned=banned).double()
    whole = log_probs[:1]
    scores: np.ndarray = (whole.exp() * (whole - log_probs[1:])).sum((1, 2)).cpu().numpy()
    return scores


def _embedded(bundle: ModelBundle, prompt: Prompt, response: np.ndarray) -> Tensor:
    """Return the decoder's inputs for a prompt and a response, `[time, hidden]`."""
    device = next(bundle.model.parameters()).device
    ids = torch.from_numpy(np.concatenate([prompt.ids, response])).to(device)
    if not prompt.images:
        return bundle.embed(ids)
    features = bundle.features(bundle.pixel_values(prompt.images).to(device))
    shown = zip(features, shown_patches(bundle, prompt), strict=True)
    return bundle.embed(
        ids, torch.cat([one[torch.from_numpy(part).to(device)] for one, part in shown])
    )


def shown_patches(bundle: ModelBundle, prompt: Prompt) -> list[np.ndarray]:
    """Return the indices of the patches that each image of a prompt shows."""
    if prompt.patches is not None:
        return prompt.patches
    return [np.arange(bundle.num_image_tokens(image)) for image in prompt.images]
