"""Occlusion scores of a prompt's parts (Zeiler and Fergus, 2014), by which `LeaveOut` chooses what is left out.

The policy first gives its greedy response to the whole prompt. The score of a patch or turn is the change of the
response's probabilities without it. This involves no randomness.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ragen_pl.engines.generation_check import GenerationCheck
from ragen_pl.engines.protocol import GenerationRequest, Prompt, RolloutEngine, generate
from ragen_pl.models.image_features import ImageFeatures
from ragen_pl.models.inputs import occluded_inputs, run_decoder, shown_patches

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle

# sequences in one decoder call
_ROWS = 128


def occlusion_scores(
    bundle: ModelBundle,
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    candidates: Sequence[Sequence[np.ndarray]],
    *,
    max_tokens: Sequence[int],
) -> list[np.ndarray]:
    """Score groups of positions by how much the policy's greedy response depends on them.

    The score is the sum over the response's tokens of KL(whole prompt ‖ prompt without the positions), in nats. The
    engine forgets its sessions.

    Args:
        bundle: Policy's model, with the weights that the engine samples with.
        engine: Engine for the greedy responses.
        prompts: Whole prompts.
        candidates: Groups of positions (int64) of each prompt, each left out together.
        max_tokens: Length limit of each response.

    Returns:
        float64 `[candidates]` for each prompt.
    """
    requests = [
        GenerationRequest(session=number, prompt=prompt, max_tokens=limit, temperature=0.0, seed=0)
        for number, (prompt, limit) in enumerate(zip(prompts, max_tokens, strict=True))
    ]
    check = GenerationCheck.of(bundle)
    generations = generate(engine, requests, keep=False, check=check)
    responses = [generation.ids for generation in generations]
    # nothing here takes a gradient, and validation may run in inference mode already
    with torch.inference_mode():
        return [
            _scores(bundle, prompt, response, groups) if groups else np.zeros(0)
            for prompt, response, groups in zip(prompts, responses, candidates, strict=True)
        ]


def _scores(
    bundle: ModelBundle, prompt: Prompt, response: np.ndarray, candidates: Sequence[np.ndarray]
) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate([prompt.ids, response])).to(bundle.device)
    features = _features(bundle, prompt) if prompt.images else None
    positions = np.arange(len(ids))
    kept = [positions, *(np.delete(positions, left_out) for left_out in candidates)]
    parts: list[Tensor] = []
    for start in range(0, len(kept), _ROWS):
        inputs, lengths = occluded_inputs(
            bundle, ids, features=features, kept=kept[start : start + _ROWS]
        )
        states = run_decoder(bundle, inputs)
        # the response ends every row; the state before a token predicts it
        back = torch.arange(len(response), 0, -1, device=ids.device)
        columns = lengths[:, None] - back[None, :] - 1
        rows = torch.arange(len(lengths), device=ids.device)[:, None]
        parts.append(bundle.log_probs(states[rows, columns]).double())
    log_probs = torch.cat(parts)
    whole = log_probs[:1]
    scores: np.ndarray = (whole.exp() * (whole - log_probs[1:])).sum((1, 2)).cpu().numpy()
    return scores


def _features(bundle: ModelBundle, prompt: Prompt) -> ImageFeatures:
    """Return the features of the prompt's image tokens."""
    assert bundle.images is not None
    features = bundle.images.encode(prompt.images)
    shown = shown_patches(bundle, prompt.images, prompt.patches)
    return features.select(range(len(prompt.images)), shown)
