"""EnvironmentManager: owns environments, their seeds and the reward terms of a turn.

Environments are given by class path or gymnasium id, never imported. The manager carries out several
actions a turn, penalizes invalid responses and limits turns. Rules belong to the environment itself.
"""

from __future__ import annotations

import copy
import hashlib
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

import gymnasium
from annotated_types import Interval

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count, NonNegative
from ragen_pl.base.instances import instances
from ragen_pl.base.prompt_formats import PromptFormat, format_instructions
from ragen_pl.base.seeding import derive_seed
from ragen_pl.environments.answers import AnswerReader, Step
from ragen_pl.environments.classes import environment_maker
from ragen_pl.environments.members import EnvironmentMembers
from ragen_pl.environments.slot import EnvironmentSlot, EpisodeSpec, SlotReader, TurnResult
from ragen_pl.environments.workers import EnvironmentWorkers, Outcome
from ragen_pl.prompts.parsing import ParsedResponse
from ragen_pl.prompts.spatial_relations import judged_statements
from ragen_pl.trajectory import EpisodeStatus, Observation

# of a fraction of 0.05, more than 200 are to be expected once in 30,000 episodes
_MAX_REDRAWS = 1000
_PENALTY = 0.05
FORM_ERROR = "form"
"""Error of a simulated user whose response has no valid action."""
# the creation of an environment imports libraries and may start programs
CREATION_FACTOR = 10.0
# a longer wait is more than the system's clocks take
Seconds: TypeAlias = Annotated[float, Interval(gt=0, le=1e6)]
# of fewer, redraws take long
HeldOutFraction: TypeAlias = Annotated[float, Interval(ge=0.05, le=0.5)]
_InThread: TypeAlias = tuple[gymnasium.Env[Any, Any], int]


class EnvironmentManager:
    """Create, reset and step environments, many in one call.

    Args:
        target: gymnasium id (`ragen/FrozenLake-v0`) or class path (`my_package.my_module.MyEnv`).
        kwargs: Arguments of the environment.
        max_turns: Turns of an episode, of each seat in a game of several; the limit belongs to the task
            (`EpisodeStatus.TURN_LIMIT`).
        max_actions_per_turn: Number of actions carried out of one response.
        format_penalty: Amount taken from a turn whose response has no valid action; `auto` for the one that the
            environment declares, or 0.05.
        invalid_ends: Whether such a response ends the episode, by the environment's `forfeit(seat)` where it has one;
            otherwise the state stays as it is. Where well-formed tool calls beside a malformed one are carried out, the
            episode goes on.
        turn_limit_bootstraps: Whether the turn limit truncates an episode (`EpisodeStatus.TRUNCATED`).
        prompt_format: Required form of responses.
        timeout_s: Longest time of one reset or one turn in seconds; None for no limit. The creation of an environment
            may take ten times as long.
        workers: Number of threads in which environments step; an environment stays in one of them. Several are faster
            for environments that wait for other programs or compute outside Python.
        process: Whether each environment runs in a process of its own. One that hangs, crashes or leaks memory then
            costs its own episode; a step costs a round trip more.
        memory_mb: Memory that such a process may allocate in MiB; None for no limit.
        held_out: Keys of initial states that a reset must not draw.
        held_out_fraction: Fraction of the states, by a hash of `state_key()`, that only validation sets begin in, so
            that they and training keep the environment's distribution; None for no such fraction.
        record_states: Whether turns record the `state_key()` they begin in.
        record_potentials: Whether turns record the `potential()` of the state they begin in.
        record_plans: Whether slots have the `plan()` of their state.
        blank_images: Whether images are replaced by gray ones, to measure what an agent does without them.
        rules: Rules in place of the environment's own, for `context.system_prompt=instructions`; None for these.
        max_response_tokens: Longest response in the environments of a mixture; None for `rollout.max_response_tokens`.
    """

    @checked
    def __init__(
        self,
        *,
        target: str,
        kwargs: Mapping[str, object] | None = None,
        max_turns: Count = 10,
        max_actions_per_turn: Count = 1,
        format_penalty: NonNegative | Literal["auto"] = 0.05,
        invalid_ends: bool = True,
        turn_limit_bootstraps: bool = False,
        prompt_format: PromptFormat = PromptFormat.FREE_THINK,
        timeout_s: Seconds | None = 60.0,
        workers: Count = 1,
        process: bool = False,
        memory_mb: Count | None = None,
        held_out: Collection[str] = frozenset(),
        held_out_fraction: HeldOutFraction | None = None,
        record_states: bool = False,
        record_potentials: bool = False,
        record_plans: bool = False,
        blank_images: bool = False,
        rules: str | None = None,
        max_response_tokens: Count | None = None,
    ) -> None:
        if memory_mb is not None and not process:
            raise ValueError(
                f"env.memory_mb={memory_mb}: limits the process of an environment; set env.process=true"
            )
        self.target = target
        self.kwargs = dict(kwargs or {})
        self.max_turns = max_turns
        self.max_actions_per_turn = max_actions_per_turn
        self.format_penalty = format_penalty
        self.invalid_ends = invalid_ends
        self.turn_limit_bootstraps = turn_limit_bootstraps
        self.prompt_format = PromptFormat(prompt_format)
        self.timeout_s = timeout_s
        self.held_out, self.held_out_fraction = held_out, held_out_fraction
        self.rules, self.max_response_tokens = rules, max_response_tokens
        self.resets = self.redraws = 0
        """Number of episodes begun, and of initial states drawn anew since they are held out, or are not."""
        self.reader = SlotReader(
            answers=AnswerReader(target=target, blank_images=blank_images),
            states=record_states,
            relations=bool(self.prompt_format.statements),
            potentials=record_potentials,
            plans=record_plans,
        )
        self._make = environment_maker(target, process=process, memory_mb=memory_mb)
        self._workers: EnvironmentWorkers[Any] = EnvironmentWorkers(workers, timeout_s=timeout_s)
        # usable environments with their threads, and the idle ones among them
        self._usable: list[_InThread] = []
        self._idle: list[_InThread] = []
        self._made = 0
        # environments whose turn is under way, by the number of the turn
        self._stepping: dict[int, EnvironmentSlot] = {}
        weakref.finalize(self, _close_all, self._usable, self._workers)
        # the manager whose environments these are: they are closed at its end
        self._owner: EnvironmentManager | None = None

    @property
    def managers_by_name(self) -> Mapping[str, EnvironmentManager]:
        """This manager under an empty name; the managers of a mixture under those of their environments."""
        return {"": self}

    def of(self, slot: EnvironmentSlot) -> EnvironmentManager:
        """Return the manager with the settings of a slot's environment: this one, unless it is a mixture."""
        return self

    def holding_out(self, keys: Collection[str]) -> EnvironmentManager:
        """Return a manager of the same environments whose resets do not draw these initial states."""
        held = copy.copy(self)
        held.held_out, held._owner = frozenset(keys), self
        return held

    @property
    def draws(self) -> tuple[int, int]:
        """Number of initial states drawn anew, and of episodes begun."""
        return self.redraws, self.resets

    def penalty(self, members: EnvironmentMembers) -> float:
        """Return the amount that a response without a valid action costs in an environment."""
        if self.format_penalty != "auto":
            return self.format_penalty
        declared = members.format_penalty
        return _PENALTY if declared is None else declared

    def make(self) -> gymnasium.Env[Any, Any]:
        """Create an environment."""
        return self._make(**self.kwargs)

    def open(self, specs: Sequence[EpisodeSpec]) -> list[EnvironmentSlot]:
        """Return a slot at its first observation for each episode; a failed reset leaves its error there."""
        self._stepping.clear()
        slots = [
            EnvironmentSlot(env=env, worker=worker, spec=spec)
            for spec, (env, worker) in zip(specs, self._take(len(specs)), strict=True)
        ]
        outcomes = self._workers.run([(slot.worker, partial(self._reset, slot)) for slot in slots])
        for slot, outcome in zip(slots, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                slot.fail(outcome)
            else:
                self.redraws += outcome
        self.resets += len(slots)
        return slots

    def _take(self, count: int) -> list[_InThread]:
        """Return idle or new environments with their threads."""
        taken = [self._idle.pop() for _ in range(min(count, len(self._idle)))]
        workers = [self._made + number for number in range(count - len(taken))]
        self._made += len(workers)
        outcomes = self._workers.run(
            [(worker, self.make) for worker in workers], time_limit_factor=CREATION_FACTOR
        )
        errors = instances(outcomes, BaseException)
        made = [
            (outcome, worker)
            for worker, outcome in zip(workers, outcomes, strict=True)
            if not isinstance(outcome, BaseException)
        ]
        self._usable += made
        if errors:
            self._idle += [*taken, *made]
            raise errors[0]
        return [*taken, *made]

    def step(
        self, slots: Sequence[EnvironmentSlot], responses: Sequence[ParsedResponse]
    ) -> list[TurnResult]:
        """Carry out one response in each environment and wait for all."""
        numbers = self.start(slots, responses)
        results: dict[int, TurnResult] = {}
        while len(results) < len(numbers):
            results.update(self.finished())
        return [results[number] for number in numbers]

    def start(
        self, slots: Sequence[EnvironmentSlot], responses: Sequence[ParsedResponse]
    ) -> list[int]:
        """Start to carry out one response in each environment; return the numbers of these turns."""
        pairs = zip(slots, responses, strict=True)
        numbers = self._workers.submit(
            [(slot.worker, partial(self._turn, slot, response)) for slot, response in pairs]
        )
        self._stepping.update(zip(numbers, slots, strict=True))
        return numbers

    def finished(self, *, wait_s: float | None = None) -> list[tuple[int, TurnResult]]:
        """Return the turns that have ended since the last call, each with its number.

        Args:
            wait_s: Longest time to wait for the first one in seconds; None waits until there is one.
        """
        # those of a rollout that was interrupted are dropped
        return [
            (number, _turn_result(self._stepping.pop(number), outcome))
            for number, outcome in self._workers.collect(wait_s=wait_s)
            if number in self._stepping
        ]

    def close(self, slots: Sequence[EnvironmentSlot]) -> None:
        """Keep usable environments for later episodes, and close the others.

        Those whose turn is under way are closed too, after it.
        """
        stepping = {id(slot) for slot in self._stepping.values()}
        for slot in slots:
            if slot.error is None and id(slot) not in stepping:
                self._idle.append((slot.env, slot.worker))
            else:
                self._discard(slot)

    def close_idle(self) -> None:
        """Close the environments that no slot holds, each in its thread; later episodes make new ones."""
        closed = {id(env) for env, _ in self._idle}
        self._usable[:] = [(env, worker) for env, worker in self._usable if id(env) not in closed]
        self._workers.run([(worker, env.close) for env, worker in self._idle])
        self._idle.clear()

    def _discard(self, slot: EnvironmentSlot) -> None:
        from ragen_pl.environments.process import ProcessEnvironment

        self._usable[:] = [(env, worker) for env, worker in self._usable if env is not slot.env]
        if isinstance(slot.env, ProcessEnvironment):
            slot.env.kill()
        # one that hangs keeps its thread, where alone it could be closed
        elif not slot.hangs:
            self._workers.submit([(slot.worker, slot.env.close)])

    def state_keys(self, slots: Sequence[EnvironmentSlot]) -> list[str | None]:
        """Return the `state_key()` of each slot's state. One that raises leaves its error in the slot."""
        outcomes = self._workers.run([(slot.worker, slot.members.state_key) for slot in slots])
        for slot, outcome in zip(slots, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                slot.fail(outcome)
        return [None if isinstance(outcome, BaseException) else outcome for outcome in outcomes]

    def instructions(self, slot: EnvironmentSlot, *, seat: int = 0) -> str:
        """Return the rules of a seat of a slot's environment and those of the response's form."""
        form = format_instructions(
            self.prompt_format,
            max_actions=self.max_actions_per_turn,
            free_text=slot.action_names is None,
        )
        # one that failed may be dead, or hang and never answer
        if slot.error is not None:
            return form
        # a chat template shows the tools itself
        rules = slot.members.rules if self.tools(slot) else slot.members.instructions
        rules = rules if self.rules is None else self.rules
        of_seat = slot.members.seat_instructions(seat) if slot.seats > 1 else None
        return f"{of_seat or rules} {form}".strip()

    def tools(self, slot: EnvironmentSlot, *, seat: int = 0) -> Sequence[Mapping[str, Any]] | None:
        """Return the schemas of a seat's tools, None where responses are not in the model's own format."""
        if self.prompt_format is not PromptFormat.NATIVE:
            return None
        if slot.error is not None or (slot.seats > 1 and slot.members.seat_instructions(seat)):
            return ()
        return slot.members.tool_schemas

    def _reset(self, slot: EnvironmentSlot) -> int:
        """Begin an episode in a state that it may begin in; return how many others were drawn before."""
        spec = slot.spec
        options = dict(spec.options) if spec.options else None
        if spec.held_out is not None and slot.members.draws_held_out:
            options = {**(options or {}), "held_out": spec.held_out}
        answer = slot.env.reset(seed=spec.seed, options=options)
        draw = 0
        while self._is_barred(slot):
            draw += 1
            if draw > _MAX_REDRAWS:
                found = "not held out" if spec.held_out else "held out"
                raise RuntimeError(
                    f"{_MAX_REDRAWS} initial states in a row are {found}; the environment is too small "
                    "for its validation set"
                )
            seed = derive_seed(spec.seed, "redraw", draw)
            answer = slot.env.reset(seed=seed, options=options)
        self.reader.begin(slot, answer)
        return draw

    def _is_barred(self, slot: EnvironmentSlot) -> bool:
        """Return whether the slot's episode must not begin in its present state."""
        fraction, wanted = self.held_out_fraction, slot.spec.held_out
        if fraction is None or wanted is None:
            return bool(self.held_out) and slot.members.state_key() in self.held_out
        key = slot.members.state_key()
        if key is None:
            raise TypeError("has no state_key(); set env.held_out_fraction=null")
        return is_held_out(key, fraction) != wanted

    def _turn(self, slot: EnvironmentSlot, response: ParsedResponse) -> TurnResult:
        if slot.awaits_answer:
            return self._answer(slot, response)
        slot.turn += 1
        result, relations, seat = TurnResult(), slot.relations, slot.seat
        if not response.actions and response.problem is not None:
            slot.observation = Observation(text=f"error: {response.problem}")
        shown: list[Observation] = []
        for action in response.actions:
            self._act(slot, action, result)
            shown += [] if result.observation is None else [result.observation]
            if result.status is not None or not result.valid or slot.seat != seat:
                break
        if response.calls:
            result.observation = slot.observation = _tool_results(shown, calls=len(response.calls))
        if not response.valid:  # calls beside a malformed one have been carried out
            self._refuse(slot, result, seat=seat, ends=not response.actions)
        if response.valid and relations is not None:
            result.statements = judged_statements(
                response.statements,
                {"before": relations, "after": slot.relations or []},
                names=slot.members.relation_names,
            )
        if result.status is None and slot.turn >= self.max_turns * slot.seats:
            result.status = (
                EpisodeStatus.TRUNCATED if self.turn_limit_bootstraps else EpisodeStatus.TURN_LIMIT
            )
        return result

    def _answer(self, slot: EnvironmentSlot, response: ParsedResponse) -> TurnResult:
        """Give a program the answer to its request, or the reason why there is none, and wait for its next one.

        The program judges the answer, and limits its turns itself.
        """
        from ragen_pl.prompts.message_format import action_text, content_of

        result = TurnResult()
        (answer,) = response.actions
        self._act(slot, answer, result)
        result.actions = [action_text(call) for call in response.calls]
        if response.refused or not result.answer.delivered:
            return result
        if response.valid and not response.calls:
            result.actions = [content_of(str(answer))]
        slot.turn += 1
        result.effective = True
        if response.problem is not None:
            result.valid = False
            result.reward_terms["format"] = -self.penalty(slot.members)
        return result

    def _refuse(
        self, slot: EnvironmentSlot, result: TurnResult, *, seat: int, ends: bool = True
    ) -> None:
        """Penalize an invalid response or action of a seat; with `ends` it ends the episode if `invalid_ends` is set.

        An invalid action may have passed the turn on to another seat.
        """
        result.valid = False
        result.reward_terms["format"] = -self.penalty(slot.members)
        result.observation = slot.observation
        if seat == slot.user_seat:
            result.user_errors.append([FORM_ERROR])
        if ends and self.invalid_ends and result.status is None:
            if slot.members.forfeits:
                answer = slot.members.forfeit(seat)
                _add_step(result, self.reader.take(slot, answer, mover=seat))
            result.status = EpisodeStatus.TERMINATED

    def _act(self, slot: EnvironmentSlot, action: int | str, result: TurnResult) -> None:
        """Carry out one action and add its outcome to the turn's result."""
        longest, seat = slot.members.max_action_length, slot.seat
        if isinstance(action, str) and longest is not None and len(action) > longest:
            self._refuse(slot, result, seat=seat)
            return
        step = self.reader.take(slot, slot.env.step(action), mover=seat)
        _add_step(result, step)
        result.actions.append(slot.action_text(action))
        result.effective |= step.action_is_effective
        result.answer = step.answer
        result.observation = slot.observation
        if step.terminated or step.truncated:
            result.status = EpisodeStatus.TERMINATED if step.terminated else EpisodeStatus.TRUNCATED
        if not step.action_is_valid:
            self._refuse(slot, result, seat=seat)


def _add_step(result: TurnResult, step: Step) -> None:
    """Add the rewards of a step to those of the turn; its success and info replace those before."""
    for name, value in step.reward_terms.items():
        result.reward_terms[name] = result.reward_terms.get(name, 0.0) + value
    before = result.seat_rewards or [0.0] * len(step.seat_rewards)
    result.seat_rewards = [old + new for old, new in zip(before, step.seat_rewards, strict=True)]
    result.seat_success = [*step.seat_success]
    if step.user_errors is not None:
        result.user_errors.append(step.user_errors)
    result.success, result.info = step.success, step.info


def _tool_results(shown: Sequence[Observation], *, calls: int) -> Observation:
    """Return the observations after tool calls as one, with a result for each call and its images."""
    not_carried_out = Observation(text="error: not carried out")
    observations = [*shown, *[not_carried_out] * (calls - len(shown))]
    results = [observation.text for observation in observations]
    return Observation(
        text="\n".join(results),
        images=[image for observation in observations for image in observation.images],
        results=results,
        result_images=[len(observation.images) for observation in observations],
    )


def is_held_out(key: str, fraction: float) -> bool:
    """Return whether a state belongs to the held-out fraction of all states, by a hash of its key."""
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8]) < fraction * 2**64


def _turn_result(slot: EnvironmentSlot, outcome: Outcome[TurnResult]) -> TurnResult:
    if isinstance(outcome, BaseException):
        slot.fail(outcome)
        return TurnResult(status=EpisodeStatus.FAILED, error=slot.error)
    return outcome


def _close_all(environments: Sequence[_InThread], workers: EnvironmentWorkers[Any]) -> None:
    """Close environments in their threads. The main thread waits for them.

    Another one, in which the manager is collected as garbage, must not: it may be one of theirs, or the one that
    answers their programs.
    """
    jobs = [(worker, env.close) for env, worker in environments]
    if threading.current_thread() is threading.main_thread():
        workers.run(jobs)
    else:
        threading.Thread(target=workers.run, args=(jobs,)).start()
