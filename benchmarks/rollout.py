"""Time the rollout engine against `model.generate` called afresh every turn on the whole history.

Both sides play the same dialogue with the same model: as many environments, turns and tokens a response (the end
of a turn can't be sampled), the whole history shown, sampled at temperature 1. Then the engine alone
plays longer and longer dialogues: the exponent of their cost in the number of turns.

Run as `python benchmarks/rollout.py`; `--clock cpu` counts this process's own seconds on a busy machine.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import gymnasium
import numpy as np
import torch
from timing import CLOCKS, Clock, use_threads

import envs  # noqa: F401 - registers the environments
import visual_envs  # noqa: F401
from ragen_pl.models.build import build_small_lm, build_small_vlm
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.rollout.context import ContextManager
from ragen_pl.rollout.engine import GenerationRequest, Prompt, RolloutEngine, generate
from ragen_pl.rollout.transformers_engine import TransformersEngine
from ragen_pl.seeding import derive_seed
from ragen_pl.trajectory import Observation

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
WORLDS = {
    False: "ragen/FrozenLake-v0",
    True: "ragen/FrozenLakeVisual-v0",
}  # by whether a model sees
TARGET_SPEEDUP, TARGET_EXPONENT = 5.0, 1.2
TURNS_OF_FIT = (4, 8, 16, 32)
Response = Callable[[int, list[Prompt]], list[np.ndarray]]
"""(turn, a prompt an environment) → the sampled ids of each environment's response."""


class Endless(ModelBundle):
    """A bundle whose policy can't end a response before its limit."""

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """Ids that can't be sampled, the ends of a turn among them."""
        return tuple(sorted({*super().banned_token_ids, *self.eos_token_ids}))


@dataclass(frozen=True, kw_only=True)
class Dialogue:
    """What both sides are shown: an environment's rules or nothing, then an observation a turn."""

    slots: int
    turns: int
    rules: bool

    def play(self, bundle: ModelBundle, response: Response) -> None:
        """Play it with the whole history shown; images differ by environment and turn, words by turn only."""
        system = "instructions" if self.rules else None
        context = ContextManager(bundle, window="all", system_prompt=system, max_tokens=10**6)
        name = WORLDS[bundle.image_token_id is not None]
        rules = gymnasium.make(name).unwrapped.instructions
        conversations = [context.start(rules) for _ in range(self.slots)]
        for turn in range(self.turns):
            text, images = observations(name, turn, self.slots)
            prompts = []
            for slot, conversation in enumerate(conversations):
                seen = Observation(text=text, images=images[slot : slot + 1])
                prompts.append(context.observe(conversation, seen, max_turns=self.turns))
            for conversation, ids in zip(conversations, response(turn, prompts), strict=True):
                context.response(conversation, ids=ids, text="", actions=[])


@cache
def observations(world_id: str, turn: int, slots: int) -> tuple[str, list[np.ndarray]]:
    """Return one text for all environments of a turn, and each environment's image; drawn once, outside all timing."""
    environment: Any = gymnasium.make(world_id).unwrapped
    first = 1000 * turn
    shown = environment.reset(seed=first)[0]
    if isinstance(shown, str):
        return shown, []
    return shown["text"], [
        environment.reset(seed=first + slot)[0]["image"] for slot in range(slots)
    ]


def engine_response(
    engine: RolloutEngine, tokens: int, turn: int, prompts: list[Prompt]
) -> list[np.ndarray]:
    """Response with the engine, its caches kept between turns."""
    requests = [
        GenerationRequest(
            session=slot, prompt=prompt, max_tokens=tokens, temperature=1.0,
            seed=derive_seed("benchmark", slot, turn),
        )
        for slot, prompt in enumerate(prompts)
    ]  # fmt: skip
    return [generation.ids for generation in generate(engine, requests, keep=True)]


@torch.inference_mode()
def generate_response(
    bundle: ModelBundle, tokens: int, turn: int, prompts: list[Prompt]
) -> list[np.ndarray]:
    """Response with transformers' own `generate` on the whole history."""
    ids = torch.from_numpy(np.stack([prompt.ids for prompt in prompts]))
    images = [image for prompt in prompts for image in prompt.images]
    pixels = {"pixel_values": bundle.pixel_values(images)} if images else {}
    output = bundle.model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), **pixels, do_sample=True, top_k=0, use_cache=True,
        suppress_tokens=list(bundle.banned_token_ids), min_new_tokens=tokens, max_new_tokens=tokens,
        pad_token_id=bundle.pad_token_id,
    )  # type: ignore[operator]  # fmt: skip
    return list(output[:, ids.shape[1] :].numpy())


def seconds_of(action: Callable[[], None], clock: Clock, *, rounds: int = 1) -> float:
    """Return the seconds of the quickest of some rounds."""
    times = []
    for _ in range(rounds):
        began = clock()
        action()
        times.append(clock() - began)
    return min(times)


def compare(name: str, bundle: ModelBundle, args: argparse.Namespace) -> None:
    """Print the row of one model: engine, generate, ratio."""
    larger = name.startswith("larger")
    slots, rounds = (max(1, args.slots // 16), 1) if larger else (args.slots, args.rounds)
    engine = TransformersEngine(PolicyModule(bundle))
    tokens = args.response_tokens
    dialogue = Dialogue(slots=slots, turns=args.turns, rules=args.rules)

    def ours() -> None:
        engine.load_weights(0)
        dialogue.play(bundle, partial(engine_response, engine, tokens))

    def theirs() -> None:
        dialogue.play(bundle, partial(generate_response, bundle, tokens))

    ours()  # a first round, not counted, draws the observations
    both = [
        [seconds_of(side, CLOCKS[args.clock]) for side in (ours, theirs)] for _ in range(rounds)
    ]
    mine, other = (min(side) for side in zip(*both, strict=True))
    responses = slots * args.turns
    verdict = ""
    if name.startswith("default"):
        verdict = "met" if other / mine >= TARGET_SPEEDUP else "missed"
    print(
        f"{name:<18}{bundle.parameter_count() / 1e6:>7.1f}{slots:>7}"
        f"{responses * tokens / mine:>12,.0f}{responses / mine:>9,.1f}"
        f"{responses * tokens / other:>12,.0f}{responses / other:>9,.1f}{other / mine:>8.1f}  {verdict}",
        flush=True,
    )


def fit(name: str, bundle: ModelBundle, args: argparse.Namespace) -> None:
    """Print seconds of a dialogue by its number of turns, and the exponent of the log-log line."""
    engine, seconds = TransformersEngine(PolicyModule(bundle)), []
    for turns in TURNS_OF_FIT:

        def action(turns: int = turns) -> None:
            engine.load_weights(0)
            response = partial(engine_response, engine, args.response_tokens)
            Dialogue(slots=args.fit_num_envs, turns=turns, rules=args.rules).play(bundle, response)

        action()
        seconds.append(seconds_of(action, CLOCKS[args.clock], rounds=args.rounds))
    found = exponent(TURNS_OF_FIT, seconds)
    row = "".join(f"{value:>9.3f}" for value in seconds)
    print(
        f"{name:<18}{row}{found:>10.2f}  {'met' if found <= TARGET_EXPONENT else 'missed'}",
        flush=True,
    )


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Return k of the least-squares fit costs = c * sizes^k on logarithms."""
    slope, _ = np.polyfit([math.log(size) for size in sizes], [math.log(cost) for cost in costs], 1)
    return float(slope)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--environments", type=int, default=128, help="a sixteenth of them with the larger model"
    )
    parser.add_argument(
        "--fit-environments", type=int, default=8, help="environments of the second table"
    )
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--response-tokens", type=int, default=13)
    parser.add_argument("--rules", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rounds", type=int, default=3, help="the quickest counts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    use_threads(args.threads)
    built = {}
    for name in args.models:
        made = MODELS[name]()
        built[name] = Endless(made.model, made.tokenizer, made.processor)
    print(f"{args.turns} turns, {args.response_tokens} tokens a response, {args.clock} seconds")
    print(f"\n{'':<18}{'':>14}{'engine':>21}{'generate':>21}")
    print(
        f"{'model':<18}{'M':>7}{'environments':>7}{'tokens/s':>12}{'turns/s':>9}{'tokens/s':>12}{'turns/s':>9}{'ratio':>8}"
    )
    for name, bundle in built.items():
        compare(name, bundle, args)
    print(
        f"\nseconds of the engine by turns, {args.fit_num_envs} environments, and the exponent "
        f"from {TURNS_OF_FIT[0]} to {TURNS_OF_FIT[-1]}"
    )
    print(f"{'model':<18}{''.join(f'{turns:>9}' for turns in TURNS_OF_FIT)}{'exponent':>10}")
    for name, bundle in built.items():
        if name.startswith("default"):
            fit(name, bundle, args)


if __name__ == "__main__":
    main()
