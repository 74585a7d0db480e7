"""ProgramEnvironment: an agent program that calls the policy over HTTP, as an environment (`env=program`).

The observation is the request that the program waits on, and the action is the answer to it.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import gymnasium
import numpy as np
from annotated_types import Gt
from gymnasium import spaces

from ragen_pl.agent_programs.launcher import ProgramLauncher, ProgramLimits
from ragen_pl.agent_programs.results import ProgramResult, read_result
from ragen_pl.agent_programs.running import RunningProgram, last_lines
from ragen_pl.agent_programs.serving.address import LOOPBACK
from ragen_pl.agent_programs.serving.chat_response import Answer
from ragen_pl.agent_programs.serving.errors import RequestError
from ragen_pl.agent_programs.serving.server import AgentServer
from ragen_pl.agent_programs.serving.session import Call, Event, EventKind, Session, SessionLimits
from ragen_pl.agent_programs.tasks import split_tasks
from ragen_pl.agent_programs.variables import Secrets, upstream
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count, PositiveFraction
from ragen_pl.trajectory import AnswerOutcome

Seconds: TypeAlias = Annotated[float, Gt(0)]
# of a program that hears that its calls are used up, and may still report
_GRACE_S = 30.0
# refused requests in a row, after which a program is ended
_MAX_REFUSED = 100
_MAX_ACTION = 1 << 28
# until a program that is killed has ended
_KILL_S = 10.0


class ProgramEnvironment(gymnasium.Env[Any, Any]):
    """Run an agent program for each episode, and let the policy answer its requests.

    The program finds the endpoint in `OPENAI_BASE_URL` and `OPENAI_API_KEY`, its task in the file `RAGEN_TASK_FILE`
    and, where it is short, in `RAGEN_TASK`, a seed in `RAGEN_SEED` and the path of its result in `RAGEN_RESULT`. It
    runs in a folder of its own. It is no sandbox: what a program or its tools must not do belongs into a container.

    Args:
        command: Command line of the program, such as `[python, my_agent.py]`.
        function: Import path of a function in place of a command. It gets the task and may be asynchronous; what it
            returns is the result.
        tasks: Tasks, one for each episode; see `ragen_pl.agent_programs.tasks`. None for a program that makes its own
            of the seed.
        validation_tasks: Tasks of validation, which training leaves out; or the fraction of `tasks` that it leaves out.
            None for the same tasks in both.
        verifier: Command that is run after the end in the same folder, out of the program's reach. Its last line of
            output is the result, in place of the program's own.
        max_calls: Answered requests of an episode. Later ones are refused.
        program_s: Longest time of an episode in seconds, without the time that the program waits for answers.
        memory_mb: Address space of each process in MiB; None for no limit.
        file_mb: Size of each file in MiB; None for no limit.
        disk_mb: Size of all files in its folder in MiB, which is looked at from time to time; None for no limit.
        output_kb: End of the output that is kept with the trajectory, in KiB.
        crash_reward: Reward of an episode whose program ends with an error, or is ended since 100 of its requests in a
            row were refused; None where such an episode fails and is not trained on.
        models: Endpoints of other models by name, `{"url", "model", "key_env"}`. Requests to them are passed on.
        response_format: `unconstrained` where requests for JSON are answered freely, for programs that check it.
        post_rewards: Whether the program may set rewards over HTTP, with the key in `RAGEN_REWARD_KEY`.
        variables: Further environment variables. They are part of the run's settings, which are written and shown.
        variables_env: Names of the trainer's environment variables that the program gets too, such as keys. Their
            values stand in no settings, and are replaced by their names in what the trainer keeps of the output.
        host: Address of the endpoint.

    Raises:
        ValueError: There is no program, or both a command and a function; or a variable of `variables_env` is not set.
    """

    needs_trust = (
        "command", "function", "tasks", "validation_tasks", "verifier", "models", "variables", "variables_env", "host",
    )  # fmt: skip

    action_space: spaces.Space[Any]
    draws_held_out = True
    """Whether `reset` takes the option `held_out`."""

    @checked
    def __init__(
        self,
        *,
        command: Sequence[str] | None = None,
        function: str | None = None,
        tasks: str | None = None,
        validation_tasks: str | PositiveFraction | None = None,
        verifier: Sequence[str] | None = None,
        max_calls: Count = 50,
        program_s: Seconds = 600.0,
        memory_mb: Count | None = None,
        file_mb: Count | None = 256,
        disk_mb: Count | None = 2048,
        output_kb: Count = 64,
        crash_reward: float | None = None,
        models: Mapping[str, Mapping[str, str]] | None = None,
        response_format: Literal["refused", "unconstrained"] = "refused",
        post_rewards: bool = False,
        variables: Mapping[str, str] | None = None,
        variables_env: Sequence[str] = (),
        host: str = LOOPBACK,
    ) -> None:
        if (command is None) == (function is None):
            raise ValueError(
                f"env.command={command}, env.function={function}: set one of them, such as env.command=[python, "
                "my_agent.py]"
            )
        self.command = None if command is None else _with_paths(command)
        self.verifier = None if verifier is None else _with_paths(verifier)
        self.function, self.max_calls, self.program_s = function, max_calls, program_s
        self.limits = ProgramLimits(
            memory_mb=memory_mb, file_mb=file_mb, disk_mb=disk_mb, output_kb=output_kb
        )
        self.crash_reward, self.post_rewards = crash_reward, post_rewards
        self.response_format = response_format
        self.secrets = Secrets(variables_env)
        self.variables = {**self.secrets.values, **(variables or {})}
        self.models = {name: upstream(name, given) for name, given in (models or {}).items()}
        if tasks is None and validation_tasks is not None:
            raise ValueError(
                f"env.validation_tasks={validation_tasks}: there are no env.tasks; set them, or leave this out"
            )
        self.tasks = None if tasks is None else split_tasks(tasks, validation_tasks)
        self._server = shared_server(host)
        self._launcher = shared_launcher(function)
        self.action_space = spaces.Text(max_length=_MAX_ACTION)
        self.observation_space = spaces.Text(max_length=_MAX_ACTION)
        self._task: Any = None
        self._seed = 0
        self._session: Session | None = None
        self._program: RunningProgram | None = None
        self._waiting: deque[Call] = deque()
        self._call: Call | None = None
        self._delivered: list[str] = []
        self._outcome: Mapping[str, Any] | None = None
        # why the program is ended before it ends by itself
        self._ended_for: str | None = None
        self._left_s = 0.0

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start the program and return its first request.

        Args:
            seed: Chooses the task; the program gets it too.
            options: `task`, another task; `held_out`, whether it is one of validation.

        Raises:
            RuntimeError: The program ended without a request, or took too long.
        """
        self._end()
        super().reset(seed=seed)
        self._seed = int(self.np_random.integers(2**31)) if seed is None else seed
        self._task = self._drawn_task(options or {})
        self._begin()
        call = self._next()
        if call is None:
            raise RuntimeError(f"the program ended without a request: {self._ending()}")
        return self._observation(call), {}

    def step(self, action: str) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Answer the program's request and return its next one, or the end of the episode.

        Args:
            action: JSON of an answer or a refusal, see `ragen_pl.rollout.requests`.

        Raises:
            RuntimeError: The program failed, or took too long.
            ValueError: Its result is not valid.
        """
        assert self._session is not None and self._call is not None
        delivered = self._answer(self._session, self._call, json.loads(action))
        call = self._next()
        if call is not None:
            outcome = AnswerOutcome(delivered=delivered)
            info = {AnswerOutcome.KEY: outcome, "reward_parts": {}}
            return self._observation(call), 0.0, False, False, info
        result = self._result()
        outcome = AnswerOutcome(
            delivered=delivered, rewards_of=result.rewards_of, invalid_turns=result.invalid_turns
        )
        info = {
            AnswerOutcome.KEY: outcome,
            "success": result.success,
            "reward_parts": result.parts,
            "program": result.info | self._facts(),
        }
        self._end()
        return {"text": "", "images": []}, sum(result.parts.values()), True, False, info

    def random_action(self, rng: np.random.Generator) -> str:
        """Return a response of one word."""
        return str(rng.choice(["yes", "no"]))

    def state_key(self) -> str:
        """Return the task, or the seed where the program makes its own."""
        return json.dumps(self._seed if self.tasks is None else self._task, sort_keys=True)

    def close(self) -> None:
        """End the program."""
        self._end()

    def _drawn_task(self, options: Mapping[str, Any]) -> Any:
        if "task" in options or self.tasks is None:
            return options.get("task")
        training, validation = self.tasks
        tasks = validation if options.get("held_out") else training
        return tasks[int(self.np_random.integers(len(tasks)))]

    def _begin(self) -> None:
        limits = SessionLimits(
            unconstrained=self.response_format == "unconstrained", refused_requests=_MAX_REFUSED
        )
        self._session = Session(
            self._server.loop,
            limits=limits,
            upstream=self.models,
            reward_key=secrets.token_hex(32) if self.post_rewards else None,
        )
        self._server.open(self._session)
        self._waiting.clear()
        self._call, self._outcome, self._ended_for = None, None, None
        self._delivered, self._left_s = [], self.program_s
        self._program = RunningProgram(
            self._server,
            self._session,
            self._launcher,
            command=self.command,
            task=self._task,
            seed=self._seed,
            variables=self.variables,
            limits=self.limits,
        )

    def _answer(self, session: Session, call: Call, answer: Mapping[str, Any]) -> bool:
        """Give an answer or a refusal; return whether the program got an answer."""
        self._call = None
        if "error" in answer:
            error = answer["error"]
            session.answer(call, RequestError(400, error["message"], code=error["code"]))
            return False
        session.answer(call, Answer.of(call.id, session.model, answer))
        delivered = self._is_delivered(call)
        if delivered:
            self._delivered.append(call.id)
        else:
            session.count("undelivered")
        return delivered

    def _is_delivered(self, call: Call) -> bool:
        """Wait until a client has got an answer, or until it is clear that none will."""
        gone = False
        while True:
            event = self._event()
            if event.call is call and event.kind is EventKind.DELIVERED:
                return True
            gone |= event.call is call and event.kind is EventKind.GONE
            # who is gone and goes on with something else does not come back
            goes_on = bool(self._waiting) or self._outcome is not None
            if gone and goes_on and call.session.withdraw_answer(call):
                return False

    def _next(self) -> Call | None:
        """Return the program's oldest request, None once it has ended."""
        assert self._session is not None
        while True:
            while self._waiting and self._ended_for is None:
                call = self._waiting.popleft()
                if len(self._delivered) < self.max_calls:
                    self._call = call
                    return call
                self._left_s = min(self._left_s, _GRACE_S)
                refused = (
                    f"the episode has had its {self.max_calls} calls; a program that goes on calling after "
                    f"env.max_turns={self.max_calls} calls is ended"
                )
                self._session.answer(call, RequestError(400, refused, code="call_limit"))
            if self._outcome is not None:
                return None
            self._event()

    def _event(self) -> Event:
        """Wait for an event and note requests and the program's end. The time counts as the program's."""
        assert self._session is not None
        begin = time.monotonic()
        try:
            event = self._session.events.get(timeout=self._left_s)
        except queue.Empty:
            self._end()
            raise RuntimeError(
                f"the program took longer than env.kwargs.program_s={self.program_s:g} s, without the time of its "
                "requests"
            ) from None
        finally:
            self._left_s = max(0.001, self._left_s - (time.monotonic() - begin))
        if event.kind is EventKind.REQUEST and event.call is not None:
            self._waiting.append(event.call)
        elif event.kind is EventKind.REFUSED and self._program is not None:
            self._ended_for = event.outcome["reason"]
            self._program.kill()
        elif event.kind is EventKind.EXIT:
            self._outcome = event.outcome
        return event

    def _observation(self, call: Call) -> dict[str, Any]:
        assert call.client is not None
        chat = replace(call.client.chat, call_id=call.id)
        return {"text": "", "images": call.client.images, "request": chat}

    def _result(self) -> ProgramResult:
        """Return the result of a program that has ended."""
        assert self._session is not None and self._outcome is not None
        assert self._program is not None
        if self._ended_for is not None or self._outcome.get("code") != 0:
            if self.crash_reward is None:
                # the policy's responses may be why it goes on asking
                advice = "; env.kwargs.crash_reward=-1 trains on such episodes"
                failure = f"the program failed: {self._ending()}"
                raise RuntimeError(failure if self._ended_for is None else failure + advice)
            return ProgramResult(parts={"crash": self.crash_reward})
        if self.verifier is None:
            text = self._program.result()
        else:
            try:
                text = self._program.verified(self.verifier, timeout_s=self.program_s)
            except RuntimeError as error:
                raise RuntimeError(self.secrets.hidden_in(str(error))) from None
        text = None if text is None else self.secrets.hidden_in(text)
        return read_result(text, posted=self._session.rewards, call_ids=self._delivered)

    def _facts(self) -> dict[str, Any]:
        assert self._session is not None and self._outcome is not None
        output = self.secrets.hidden_in(str(self._outcome.get("output", "")))
        return {"output": output, "requests": dict(self._session.counts)}

    def _ending(self) -> str:
        """Return how the program ended, with the last lines of its output."""
        outcome = self._outcome or {}
        if self._ended_for is not None:
            how = self._ended_for
        elif outcome.get("disk_exceeded"):
            how = f"its files take more than env.kwargs.disk_mb={self.limits.disk_mb}"
        elif outcome.get("signal") is not None:
            how = f"signal {outcome['signal']}"
        else:
            how = outcome.get("error") or f"exit code {outcome.get('code')}"
        output = self.secrets.hidden_in(str(outcome.get("output", "")))
        return f"{how}; its last lines: {last_lines(output)}"

    def _end(self) -> None:
        """End the program and its session."""
        if self._session is None or self._program is None:
            return
        self._server.end(self._session)
        self._program.kill()
        with suppress(queue.Empty):
            while self._outcome is None:
                event = self._session.events.get(timeout=_KILL_S)
                self._outcome = event.outcome if event.kind is EventKind.EXIT else None
        self._program.remove(is_lost=self._outcome is None or "error" in self._outcome)
        self._session = self._program = None


@cache
def shared_server(host: str) -> AgentServer:
    """Return the endpoint that all programs of this process share."""
    return AgentServer(host=host)


@cache
def shared_launcher(function: str | None) -> ProgramLauncher:
    """Return the launcher that all programs of a function, or all commands, share."""
    return ProgramLauncher(function)


def _with_paths(command: Sequence[str]) -> list[str]:
    """Return a command with the full paths of files, since it runs in another folder.

    Links are kept: the interpreter of a virtual environment is one, and knows its packages by its own path.
    """
    return [os.path.abspath(part) if Path(part).is_file() else part for part in command]
