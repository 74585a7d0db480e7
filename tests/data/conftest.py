"""Made-up trajectories with the ids of a context of a given window."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ragen_pl.prompts.context import ContextManager
from ragen_pl.trajectory import EpisodeStatus, Observation, Trajectory, Turn

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_trajectory():
    """Return a maker: a response for each length in `lengths`; a negative length hit its length limit."""

    def make(
        bundle, lengths, *, seed=0, window="all", group=0, member=0, rewards=None,
        status=EpisodeStatus.TERMINATED, images=False,
    ) -> Trajectory:  # fmt: skip
        rng = np.random.default_rng(seed)
        context = ContextManager(bundle, window=window, system_prompt=None)
        conversation, turns = context.start(""), []

        def see(number):
            image = rng.integers(0, 255, (32, 32, 3)).astype(np.uint8)
            observation = Observation(text=f"see {number}", images=[image] if images else [])
            return observation, context.observe(conversation, observation, max_turns=9)

        for number, length in enumerate(lengths):
            observation, prompt = see(number)
            ids = rng.integers(20, 200, abs(length))
            if length > 0:
                ids[-1] = bundle.end_of_turn_id
            context.response(conversation, ids=ids, text="".join(context.pieces(ids)), actions=[])
            turns.append(
                Turn(
                    observation=observation, prompt_ids=prompt.ids, prompt_images=prompt.images,
                    response_ids=ids, response_logprobs=rng.normal(size=len(ids)).astype(np.float32),
                    response_entropy=1.0,
                    spans=rng.integers(0, 4, len(ids)).astype(np.int8),
                    response_text="", think=None, actions=[], action_is_valid=True,
                    action_is_effective=True, hit_length_limit=length < 0, temperature=0.5 + number,
                    reward_terms={"environment": rewards[number] if rewards else float(rng.integers(-1, 2))},
                )
            )  # fmt: skip
        final = see(len(lengths))[1] if status is EpisodeStatus.TRUNCATED else None
        return Trajectory(
            group=group, member=member, seed=seed, turns=turns, status=status, success=False,
            final_prompt_ids=None if final is None else final.ids,
            final_images=[] if final is None else final.images,
        )  # fmt: skip

    return make
