"""Patches and old turns that are left out of a prompt before a response is sampled.

Those with the lowest scores (`ragen_pl.engines.occlusion`) are left out. The response is sampled from what remains and
trained on with the same prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import FractionBelowOne


@checked
@dataclass(frozen=True, kw_only=True)
class LeaveOut:
    """Fractions of the context that are left out.

    Attributes:
        patches: Fraction of each new image's patches. They stay out for the rest of the episode.
        turns: Fraction of the old turns in the window, chosen anew for every response. The present turn always stays.
    """

    patches: FractionBelowOne = 0.0
    turns: FractionBelowOne = 0.0

    def __bool__(self) -> bool:
        return self.patches > 0 or self.turns > 0

    def drop_patches(
        self, ids: np.ndarray, scores: np.ndarray, *, slot: int | None, patches: Sequence[int]
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Drop the patches with the lowest scores from a turn's ids; of equal scores the later patch.

        Args:
            ids: int64 `[turn]`, with all patches.
            scores: `[turn]`, read at the image slots.
            slot: Id of an image slot.
            patches: Number of patches of each image.

        Returns:
            The remaining ids, and the sorted indices of each image's remaining patches.
        """
        places, shown, keep = np.flatnonzero(ids == slot), [], np.ones(len(ids), dtype=bool)
        for image in np.split(places, np.cumsum(patches)[:-1]) if len(patches) else []:
            count = len(image) - math.floor(self.patches * len(image) + 1e-9)
            best = np.sort(np.argsort(-scores[image], kind="stable")[:count])
            keep[image], keep[image[best]] = False, True
            shown.append(best)
        return ids[keep], shown

    def dropped_turns(self, scores: Sequence[float]) -> frozenset[int]:
        """Return the old turns with the lowest scores; of equal scores the older turn.

        Args:
            scores: Scores of the old turns in the window, oldest first.
        """
        count = math.floor(self.turns * len(scores) + 1e-9)
        return frozenset(np.argsort(np.asarray(scores), kind="stable")[:count].tolist())
