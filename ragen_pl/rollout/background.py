"""A rollout in a thread of its own, while the policy trains."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ragen_pl.environments.manager import EpisodeSpec
from ragen_pl.rollout.proxy import AgentProxy, Progress
from ragen_pl.rollout.responders import ForwardingResponder, Responder, Response
from ragen_pl.rollout.turns import Episode
from ragen_pl.trajectory import Trajectory

THREAD_NAME = "rollout ahead"
# seconds between two looks at a response, and at the progress
_RESPONSE_S, _PROGRESS_S = 0.002, 0.05


class BackgroundRollout:
    """A rollout that starts at once, in a thread of its own.

    The thread draws from no global generator and needs no other rank. Nothing else may play with the proxy, or sample
    with the engine of the responder, before it ends.

    Args:
        proxy: Plays the episodes.
        responder: Answers the turns.
        episode_specs: The episodes.
        seed_key: Counters with which the sampling seeds start.
        end_s: Seconds that an impatient `stop` waits for the end.
    """

    def __init__(
        self,
        proxy: AgentProxy[Any],
        responder: Responder,
        episode_specs: Sequence[EpisodeSpec],
        *,
        seed_key: Sequence[int | str],
        end_s: float = 10.0,
    ) -> None:
        self._end_s = end_s
        self._stopped = threading.Event()
        self._done = (0, len(episode_specs))
        self._trajectories: list[Trajectory] = []
        self._error: BaseException | None = None
        stoppable = _Stoppable(responder=responder, stopped=self._stopped)
        arguments = (proxy, stoppable, episode_specs, seed_key)
        # one that hangs does not keep the process alive
        self._thread = threading.Thread(
            target=self._play, args=arguments, name=THREAD_NAME, daemon=True
        )
        self._thread.start()

    def _play(
        self,
        proxy: AgentProxy[Any],
        responder: Responder,
        episode_specs: Sequence[EpisodeSpec],
        seed_key: Sequence[int | str],
    ) -> None:
        try:
            # a thread has a grad mode of its own
            with torch.no_grad():
                self._trajectories = proxy.rollout(
                    responder, episode_specs, seed_key=seed_key, progress=self._note
                )
        except BaseException as error:  # `result` raises it
            self._error = error

    def _note(self, done: int, total: int) -> None:
        self._done = (done, total)

    def wait(self, *, progress: Progress | None = None) -> None:
        """Wait for the end.

        Args:
            progress: Called now and then, before all episodes are done. It may raise.
        """
        while self._thread.is_alive():
            # in short steps, since signals are handled between them
            self._thread.join(_PROGRESS_S)
            done, total = self._done
            if progress is not None and done < total:
                progress(done, total)

    def result(self) -> list[Trajectory]:
        """Wait for the end; return the trajectories in the order of the specs, or raise the rollout's error."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._trajectories

    def stop(self, *, wait: bool = False) -> None:
        """End the rollout at its next response.

        Args:
            wait: Wait for the end however long the environments take. Otherwise a thread that hangs is left, and
                nothing else may play with the proxy.
        """
        self._stopped.set()
        if wait:
            self.wait()
        else:
            self._thread.join(self._end_s)


class _Stopped(Exception):
    """The rollout was stopped."""


@dataclass(kw_only=True, slots=True)
class _Stoppable(ForwardingResponder):
    """A responder that does not block while a continuous engine samples, so that it can be stopped."""

    stopped: threading.Event

    def submit(self, episodes: Sequence[Episode]) -> None:
        self._check()
        self.responder.submit(episodes)

    def collect(self, *, wait: bool = True) -> list[tuple[int, Response]]:
        self._check()
        responses = self.responder.collect(wait=wait and not self.continuous)
        while wait and self.continuous and not responses:
            self.stopped.wait(_RESPONSE_S)
            self._check()
            responses = self.responder.collect(wait=False)
        return responses

    def _check(self) -> None:
        if self.stopped.is_set():
            raise _Stopped
