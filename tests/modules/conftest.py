"""The tiny agents and their batches, as a fixture."""

from __future__ import annotations

import pytest
from support.episodes import played_agents


@pytest.fixture(scope="session")
def make():
    """Return the functions of played_agents, by name."""

    class Make:
        bundle = staticmethod(played_agents.build_bundle)
        agent = staticmethod(played_agents.build_agent)
        play = staticmethod(played_agents.play)
        batch = staticmethod(played_agents.build_batch)
        minibatch = staticmethod(played_agents.build_minibatch)
        gradient = staticmethod(played_agents.take_gradient)
        copied = staticmethod(played_agents.copied)
        cut = staticmethod(played_agents.cut)

    return Make
