"""A rollout engine with weights of its own, which can sample while the policy trains."""

from __future__ import annotations

import copy
from typing import Any

from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.modules.policy import PolicyModule


class CopyEngine(TransformersEngine):
    """Engine with a copy of the policy, which only `load_weights` changes."""

    in_place = False
    asynchronous = True

    def __init__(self, policy: PolicyModule, **settings: Any) -> None:
        super().__init__(policy, **settings)
        self.policy = policy
        self.bundle = copy.deepcopy(policy.bundle)
        self.bundle.model.eval()

    def load_weights(self, version: int) -> None:
        super().load_weights(version)
        self.bundle.model.load_state_dict(self.policy.bundle.model.state_dict())
