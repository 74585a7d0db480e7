"""Time the rollout engines against each other, `generate`, TRL, and waiting for the slowest response.

All sides play the same dialogue with the same model, number of environments, turns and response tokens. The whole
history is shown, the temperature is 1 and the end of a turn cannot be sampled. Four tables:

- `ratio`: the in-process engine against `model.generate` on the whole history of every turn;
- `growth`: seconds of the engine by the number of turns, and the exponent of its cost;
- `ways`: the in-process engine, vLLM, `generate` and TRL's generation, where they are installed;
- `waiting`: vLLM with responses of very different lengths. An environment steps as soon as its response is there, or
  when all responses of the turn are; its step costs nothing, or takes a while.

Run as `python benchmarks/rollout.py`; `--clock cpu` counts the process's own seconds on a busy machine.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
from dialogue import (
    ENVIRONMENTS,
    VLLM,
    WAYS,
    Dialogue,
    Way,
    endless,
    engine_response,
    generate_response,
    opened,
    why_not,
)
from timing import CLOCKS, Stopwatch, use_threads

from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.protocol import Generation, GenerationRequest, Prompt, RolloutEngine
from ragen_pl.engines.vllm.engine import VLLMEngine
from ragen_pl.environments.manager import (
    EnvironmentManager,
    EnvironmentSlot,
    EpisodeSpec,
    TurnResult,
)
from ragen_pl.models.build import build_small_lm, build_small_vlm, load_pretrained
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.prompts.parsing import ParsedResponse
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.responders import EngineResponder

LARGER = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
MODELS: dict[str, Callable[[], ModelBundle]] = {
    "default, text": build_small_lm,
    "default, images": build_small_vlm,
    "larger, text": partial(build_small_lm, text=LARGER),
    "larger, images": partial(build_small_vlm, text=LARGER),
}
TABLES = ("ratio", "growth", "ways", "waiting")
TARGET_SPEEDUP, TARGET_EXPONENT = 5.0, 1.2
TURNS_OF_FIT = (4, 8, 16, 32)
# share of the vocabulary that ends a response of a model of chance: 20 tokens on average
ENDS = 0.05


def seconds_of(action: Callable[[], None], watch: Stopwatch, *, rounds: int = 1) -> float:
    """Return the seconds of the fastest round, without those in environments."""
    times = []
    for _ in range(rounds):
        watch.take()
        with watch.timed("all"):
            action()
        seconds = watch.take()
        times.append(seconds["all"] - seconds["environments"])
    return min(times)


def size_of(name: str, args: argparse.Namespace) -> tuple[int, int]:
    """Return the number of environments and of rounds for a model."""
    if name.startswith("larger"):
        return max(1, args.num_envs // 16), 1
    return args.num_envs, args.rounds


def compare(name: str, bundle: ModelBundle, args: argparse.Namespace) -> None:
    """Print the row of one model: engine, generate, ratio."""
    num_envs, rounds = size_of(name, args)
    engine = TransformersEngine(PolicyModule(bundle))
    tokens, watch = args.response_tokens, Stopwatch(CLOCKS[args.clock])
    dialogue = Dialogue(num_envs=num_envs, turns=args.turns, rules=args.rules, watch=watch)

    def with_engine() -> None:
        engine.load_weights(0)
        dialogue.play(bundle, partial(engine_response, engine, tokens))

    def with_generate() -> None:
        dialogue.play(bundle, partial(generate_response, bundle, tokens))

    # a first round that is not counted makes the environments
    with_engine()
    sides = (with_engine, with_generate)
    seconds = [[seconds_of(side, watch) for side in sides] for _ in range(rounds)]
    engine_seconds, generate_seconds = (min(side) for side in zip(*seconds, strict=True))
    ratio, responses = generate_seconds / engine_seconds, num_envs * args.turns
    verdict = ""
    if name.startswith("default"):
        verdict = "met" if ratio >= TARGET_SPEEDUP else "missed"
    print(
        f"{name:<18}{bundle.parameter_count() / 1e6:>7.1f}{num_envs:>7}"
        f"{responses * tokens / engine_seconds:>12,.0f}{responses / engine_seconds:>9,.1f}"
        f"{responses * tokens / generate_seconds:>12,.0f}{responses / generate_seconds:>9,.1f}"
        f"{ratio:>8.1f}  {verdict}",
        flush=True,
    )


def fit(name: str, bundle: ModelBundle, args: argparse.Namespace) -> None:
    """Print seconds of a dialogue by its number of turns, and the exponent of the log-log line."""
    engine, seconds = TransformersEngine(PolicyModule(bundle)), []
    watch = Stopwatch(CLOCKS[args.clock])
    for turns in TURNS_OF_FIT:

        def action(turns: int = turns) -> None:
            engine.load_weights(0)
            response = partial(engine_response, engine, args.response_tokens)
            dialogue = Dialogue(
                num_envs=args.fit_num_envs, turns=turns, rules=args.rules, watch=watch
            )
            dialogue.play(bundle, response)

        action()
        seconds.append(seconds_of(action, watch, rounds=args.rounds))
    slope = exponent(TURNS_OF_FIT, seconds)
    row = "".join(f"{value:>9.3f}" for value in seconds)
    print(
        f"{name:<18}{row}{slope:>10.2f}  {'met' if slope <= TARGET_EXPONENT else 'missed'}",
        flush=True,
    )


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Return k of the least-squares fit costs = c * sizes^k on logarithms."""
    slope, _ = np.polyfit([math.log(size) for size in sizes], [math.log(cost) for cost in costs], 1)
    return float(slope)


# ---- ways to sample


def compare_ways(name: str, bundle: ModelBundle, args: argparse.Namespace) -> None:
    """Print a row for each way to sample."""
    num_envs, rounds = size_of(name, args)
    tokens, watch = args.response_tokens, Stopwatch(CLOCKS[args.clock])
    dialogue = Dialogue(num_envs=num_envs, turns=args.turns, rules=args.rules, watch=watch)
    print(f"\n{name}, {bundle.parameter_count() / 1e6:.1f}M, {num_envs} environments")
    print(f"{'':<20}{'tokens/s':>12}{'turns/s':>10}{'prefilled/sampled':>20}{'environments':>14}")
    longest = longest_prompt(dialogue, bundle, tokens)
    for way in WAYS:
        if (reason := why_not(way, bundle)) is not None:
            print(f"{way:<20}  {reason}", flush=True)
            continue
        with opened(way, bundle, tokens=tokens, longest=longest) as made:
            seconds, prefilled = time_way(dialogue, bundle, made, rounds=rounds)
        turns = num_envs * args.turns
        print(
            f"{way:<20}{turns * tokens / seconds['all']:>12,.0f}{turns / seconds['all']:>10,.1f}"
            f"{prefilled / (turns * tokens):>20.1f}{seconds['environments'] / seconds['all']:>14.1%}",
            flush=True,
        )


def longest_prompt(dialogue: Dialogue, bundle: ModelBundle, tokens: int) -> int:
    """Return the tokens of a dialogue's longest prompt."""
    longest = 0
    word = next(token for token in range(10**6) if token not in bundle.banned_token_ids)

    def measured(_: int, prompts: list[Prompt]) -> list[np.ndarray]:
        nonlocal longest
        longest = max(longest, *(len(prompt.ids) for prompt in prompts))
        return [np.full(tokens, word)] * len(prompts)

    dialogue.play(bundle, measured)
    return longest


def time_way(
    dialogue: Dialogue, bundle: ModelBundle, way: Way, *, rounds: int
) -> tuple[dict[str, float], int]:
    """Play a dialogue, once in addition to warm up.

    Returns:
        The seconds of the fastest round, `all` and those in `environments`, and the prefilled tokens of a round.
    """
    best: dict[str, float] = {}
    for number in range(1 + rounds):
        before = way.prefilled()
        dialogue.watch.take()
        with dialogue.watch.timed("all"):
            way.start()
            dialogue.play(bundle, way.respond)
        seconds = dialogue.watch.take()
        if number > 0:
            best = min(best or seconds, seconds, key=lambda each: each["all"])
    return best, way.prefilled() - before


# ---- waiting for the slowest


class Together:
    """An engine that returns all responses that it was asked for at once."""

    continuous = False

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine, self.pending = engine, 0

    def submit(self, requests: Sequence[GenerationRequest], *, keep: bool) -> None:
        """Queue requests."""
        self.engine.submit(requests, keep=keep)
        self.pending += len(requests)

    def collect(self, *, wait: bool = True) -> list[tuple[int, Generation]]:
        """Wait for the slowest."""
        finished: list[tuple[int, Generation]] = []
        while len(finished) < self.pending:
            finished += self.engine.collect()
        self.pending = 0
        return finished

    def load_weights(self, version: int) -> None:
        """Use the policy's present weights."""
        self.engine.load_weights(version)

    def release(self) -> None:
        """Forget all sessions."""
        self.engine.release()


class SlowEnvironments(EnvironmentManager):
    """Environments whose steps take a while, as those that call a service do."""

    def __init__(self, *, seconds: float, **settings: Any) -> None:
        super().__init__(**settings)
        self.seconds = seconds

    def _turn(self, slot: EnvironmentSlot, response: ParsedResponse) -> TurnResult:
        time.sleep(self.seconds)
        return super()._turn(slot, response)


def with_ends(bundle: ModelBundle) -> ModelBundle:
    """Return a model of chance whose responses have very different lengths: a share of its tokens end them."""
    count = len(bundle.tokenizer)
    ends = np.linspace(0, count - 1, max(1, int(ENDS * count))).astype(int).tolist()
    bundle.model.generation_config.eos_token_id = sorted({bundle.end_of_turn_id, *ends})
    return ModelBundle(bundle.model, bundle.tokenizer, bundle.processor, bundle.image_settings)


def compare_waiting(name: str, bundle: ModelBundle, args: argparse.Namespace) -> None:
    """Print a row for each cost of a step."""
    longest = args.turns * (args.longest + 64) + 512
    context = ContextManager(bundle, window="all", max_tokens=longest)
    print(f"\n{name}, {args.waiting_envs} environments, responses of at most {args.longest} tokens")
    columns = f"{'together':>11}{'each':>9}{'ratio':>10}"
    print(f"{'':<14}{'wall seconds':>30}{'CPU seconds':>30}")
    print(f"{'a step costs':<14}{columns}{columns}{'tokens':>10}{'shortest, mean, longest':>26}")
    with closing(VLLMEngine(PolicyModule(bundle), max_tokens=longest)) as engine:
        for milliseconds in args.step_ms:
            proxy = AgentProxy(
                environments=SlowEnvironments(
                    seconds=milliseconds / 1000,
                    target=ENVIRONMENTS[bundle.image_token_id is not None],
                    max_turns=args.turns,
                    invalid_ends=False,
                    workers=args.workers,
                ),
                context=context,
                max_response_tokens=args.longest,
                num_envs=args.waiting_envs,
            )
            rounds = [
                [played(proxy, side) for side in (Together(engine), engine)]
                for _ in range(args.rounds)
            ]
            # [side, clock]
            seconds = np.min([[spent for spent, _ in sides] for sides in rounds], axis=0)
            lengths = rounds[-1][-1][1]
            row = "".join(
                f"{together:>11.2f}{each:>9.2f}{together / each:>10.2f}"
                for together, each in seconds.T
            )
            spread = f"{min(lengths)}, {np.mean(lengths):.0f}, {max(lengths)}"
            print(f"{milliseconds:>9g} ms  {row}{sum(lengths):>10,}{spread:>26}", flush=True)


def played(
    proxy: AgentProxy[ContextManager], engine: RolloutEngine | Together
) -> tuple[list[float], list[int]]:
    """Play an episode in each environment; return its seconds by each clock, and the responses' tokens."""
    engine.load_weights(0)
    specs = [EpisodeSpec(group=number, member=0, seed=number) for number in range(proxy.num_envs)]
    responder = EngineResponder(engine=engine, context=proxy.context)
    began = [clock() for clock in CLOCKS.values()]
    trajectories = proxy.rollout(responder, specs, seed_key=(0, "benchmark"))
    seconds = [clock() - since for clock, since in zip(CLOCKS.values(), began, strict=True)]
    return seconds, [len(turn.response_ids) for one in trajectories for turn in one.turns]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--num-envs", type=int, default=128, help="one sixteenth of them with the larger model"
    )
    parser.add_argument(
        "--fit-num-envs", type=int, default=8, help="environments of the table growth"
    )
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--response-tokens", type=int, default=13)
    parser.add_argument("--rules", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rounds", type=int, default=3, help="the fastest counts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--path",
        nargs="*",
        default=[],
        help="models of the table ways: folders or names on the hub",
    )
    parser.add_argument("--tables", nargs="*", choices=TABLES, default=list(TABLES))
    parser.add_argument(
        "--longest", type=int, default=128, help="longest response of the table waiting"
    )
    parser.add_argument("--waiting-envs", type=int, default=32, help="environments in it")
    parser.add_argument("--workers", type=int, default=8, help="their threads")
    parser.add_argument(
        "--step-ms", nargs="*", type=float, default=[0, 20], help="costs of a step in it"
    )
    args = parser.parse_args()
    use_threads(args.threads)
    print(f"{args.turns} turns, {args.response_tokens} tokens a response, {args.clock} seconds")
    built = {name: endless(MODELS[name]()) for name in args.models}
    if "ratio" in args.tables:
        print(f"\n{'':<18}{'':>14}{'engine':>21}{'generate':>21}")
        print(
            f"{'model':<18}{'M':>7}{'envs':>7}{'tokens/s':>12}{'turns/s':>9}{'tokens/s':>12}{'turns/s':>9}{'ratio':>8}"
        )
        for name, bundle in built.items():
            compare(name, bundle, args)
    if "growth" in args.tables:
        print(
            f"\nseconds of the engine by turns, {args.fit_num_envs} environments, and the exponent "
            f"from {TURNS_OF_FIT[0]} to {TURNS_OF_FIT[-1]}"
        )
        print(f"{'model':<18}{''.join(f'{turns:>9}' for turns in TURNS_OF_FIT)}{'exponent':>10}")
        for name, bundle in built.items():
            if name.startswith("default"):
                fit(name, bundle, args)
    if "ways" in args.tables:
        for path in args.path:
            built[path] = endless(load_pretrained(path))
        for name, bundle in built.items():
            compare_ways(name, bundle, args)
    if "waiting" in args.tables:
        for name in args.models:
            bundle = with_ends(MODELS[name]())
            reason = why_not(VLLM, bundle)
            if reason is None:
                compare_waiting(name, bundle, args)
            else:
                print(f"\n{name}, one response at a time: vLLM, {reason}")


if __name__ == "__main__":
    main()
