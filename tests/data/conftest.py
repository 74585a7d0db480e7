"""Made-up trajectories with the ids of a context of a given window."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.episodes.trajectories import in_context, make_turn

from ragen_pl.trajectory import EpisodeStatus, Observation, Trajectory

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_trajectory():
    """Return a maker: a response for each length in `lengths`; a negative length hit its length limit."""

    def make(
        bundle, lengths, *, seed=0, window="all", group=0, member=0, rewards=None,
        status=EpisodeStatus.TERMINATED, images=False,
    ) -> Trajectory:  # fmt: skip
        rng, turns = np.random.default_rng(seed), []

        def see(number):
            image = rng.integers(0, 255, (32, 32, 3)).astype(np.uint8)
            return Observation(text=f"see {number}", images=[image] if images else [])

        for number, length in enumerate(lengths):
            observation, ids = see(number), rng.integers(20, 200, abs(length))
            if length > 0:
                ids[-1] = bundle.end_of_turn_id
            turns.append(
                make_turn(
                    observation=observation, response_ids=ids,
                    response_logprobs=rng.normal(size=len(ids)).astype(np.float32),
                    spans=rng.integers(0, 4, len(ids)).astype(np.int8),
                    hit_length_limit=length < 0, temperature=0.5 + number,
                    reward=rewards[number] if rewards else float(rng.integers(-1, 2)),
                )
            )  # fmt: skip
        final = see(len(lengths)) if status is EpisodeStatus.TRUNCATED else None
        return in_context(
            bundle, turns, window=window, final=final, group=group, member=member, seed=seed, status=status
        )  # fmt: skip

    return make
