"""Rollouts in a small FrozenLake, and a module that assigns no credit."""

import envs  # noqa: F401 - registers the environments
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.environments.manager import EnvironmentManager
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy

# a small environment: initial states recur under many seeds
ENVIRONMENT = {"target": "ragen/FrozenLake-v0", "kwargs": {"size": 3, "hole_fraction": 0.1}}


def proxy_of(lm, **changes) -> AgentProxy:
    return AgentProxy(
        environments=EnvironmentManager(**(ENVIRONMENT | changes)),
        context=ContextManager(lm),
        max_response_tokens=6,
    )


class Module:
    """Rolls out with a model and assigns no credit."""

    global_step = 4

    def __init__(self, bundle) -> None:
        self.engine = TransformersEngine(PolicyModule(bundle))

    def rollout_engine(self):
        self.engine.load_weights(self.global_step)
        return self.engine

    def prepare(self, batch):
        return batch


# ---- curriculum


FAR: list[dict[str, int]] = [{}, {"min_distance": 3}]
