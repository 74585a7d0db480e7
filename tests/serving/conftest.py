from __future__ import annotations

from collections.abc import Iterator

import pytest

from ragen_pl.agent_programs.serving.server import AgentServer


@pytest.fixture(scope="module")
def server() -> Iterator[AgentServer]:
    server = AgentServer(body_s=5.0)
    yield server
    server.close()
