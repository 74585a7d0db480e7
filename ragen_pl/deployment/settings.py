"""Settings of a served policy; read without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count, Port


@checked
@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Keys of `ragen_pl.serve`, beside those of the policy.

    Attributes:
        host: Address to listen on; keys are needed for another one than that of this machine itself.
        port: Port to listen on; 0 for any free one.
        keys: Names of environment variables, each with a key that clients may send.
        served_name: Name of the model in requests and answers.
        open_requests: Requests of a key that wait at once; later ones get status 429.
        response_format: `unconstrained` answers requests for JSON freely; null does as in training.
        history_calls: Answered requests that later ones continue without being encoded again.
        history_mb: Their size in MiB.
    """

    host: str = "127.0.0.1"
    port: Port = 8000
    keys: Sequence[str] = ()
    served_name: str = "policy"
    open_requests: Count = 1024
    response_format: Literal["refused", "unconstrained"] | None = None
    history_calls: Count = 1024
    history_mb: Count = 1024
