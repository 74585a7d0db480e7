"""Time the rollout engine against `model.generate` on the whole history of every turn.

Both sides play the same dialogue with the same model, number of environments, turns and response tokens. The whole
history is shown, the temperature is 1 and the end of a turn cannot be sampled. Then the engine alone plays dialogues of
4 to 32 turns, for the exponent of the cost in the number of turns.

Run as `python benchmarks/rollout.py`; `--clock cpu` counts the process's own seconds on a busy machine.
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
# by whether the model sees images
ENVIRONMENTS = {False: "ragen/FrozenLake-v0", True: "ragen/FrozenLakeVisual-v0"}
TARGET_SPEEDUP, TARGET_EXPONENT = 5.0, 1.2
TURNS_OF_FIT = (4, 8, 16, 32)
Response = Callable[[int, list[Prompt]], list[np.ndarray]]
"""(turn, prompt of each environment) → sampled ids of each environment's response."""


class Endless(ModelBundle):
    """A bundle whose policy cannot end a response before its length limit."""

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """Ids that are never sampled, with those that end a response."""
        return tuple(sorted({*super().banned_token_ids, *self.eos_token_ids}))


@dataclass(frozen=True, kw_only=True)
class Dialogue:
    """The dialogue that both sides play: optionally an environment's rules, then one observation in each turn."""

    num_envs: int
    turns: int
    rules: bool

    def play(self, bundle: ModelBundle, response: Response) -> None:
        """Play it with the whole history shown. Images differ by environment and turn, text by turn only."""
        system = "instructions" if self.rules else None
        context = ContextManager(bundle, window="all", system_prompt=system, max_tokens=10**6)
        name = ENVIRONMENTS[bundle.image_token_id is not None]
        rules = gymnasium.make(name).unwrapped.instructions
        conversations = [context.start(rules) for _ in range(self.num_envs)]
        for turn in range(self.turns):
            text, images = observations(name, turn, self.num_envs)
            prompts = []
            for slot, conversation in enumerate(conversations):
                seen = Observation(text=text, images=images[slot : slot + 1])
                prompts.append(context.observe(conversation, seen, max_turns=self.turns))
            for conversation, ids in zip(conversations, response(turn, prompts), strict=True):
                context.response(conversation, ids=ids, text="", actions=[])


@cache
def observations(env_id: str, turn: int, num_envs: int) -> tuple[str, list[np.ndarray]]:
    """Return a turn's text and the image of each environment. Cached, so that drawing is not timed."""
    environment: Any = gymnasium.make(env_id).unwrapped
    first = 1000 * turn
    shown = environment.reset(seed=first)[0]
    if isinstance(shown, str):
        return shown, []
    return shown["text"], [
        environment.reset(seed=first + slot)[0]["image"] for slot in range(num_envs)
    ]


def engine_response(
    engine: RolloutEngine, tokens: int, turn: int, prompts: list[Prompt]
) -> list[np.ndarray]:
    """Return the engine's responses; its caches are kept between turns."""
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
    """Return the responses of transformers' `generate` on the whole history."""
    ids = torch.from_numpy(np.stack([prompt.ids for prompt in prompts]))
    images = [image for prompt in prompts for image in prompt.images]
    pixels = bundle.processor(images=images, return_tensors="pt") if images else {}
    output = bundle.model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), **pixels, do_sample=True, top_k=0, use_cache=True,
        suppress_tokens=list(bundle.banned_token_ids), min_new_tokens=tokens, max_new_tokens=tokens,
        pad_token_id=bundle.pad_token_id,
    )  # type: ignore[operator]  # fmt: skip
    return list(output[:, ids.shape[1] :].numpy())


def seconds_of(action: Callable[[], None], clock: Clock, *, rounds: int = 1) -> float:
    """Return the seconds of the fastest round."""
    times = []
    for _ in range(rounds):
        began = clock()
        action()
        times.append(clock() - began)
    return min(times)


def compare(name: str, bundle: ModelBundle, args: argparse.Namespace) -> None:
    """Print the row of one model: engine, generate, ratio."""
    larger = name.startswith("larger")
    num_envs, rounds = (args.num_envs, args.rounds)
    if larger:
        num_envs, rounds = max(1, num_envs // 16), 1
    engine = TransformersEngine(PolicyModule(bundle))
    tokens = args.response_tokens
    dialogue = Dialogue(num_envs=num_envs, turns=args.turns, rules=args.rules)

    def with_engine() -> None:
        engine.load_weights(0)
        dialogue.play(bundle, partial(engine_response, engine, tokens))

    def with_generate() -> None:
        dialogue.play(bundle, partial(generate_response, bundle, tokens))

    # a first round that is not counted draws the observations
    with_engine()
    sides = (with_engine, with_generate)
    seconds = [[seconds_of(side, CLOCKS[args.clock]) for side in sides] for _ in range(rounds)]
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
    for turns in TURNS_OF_FIT:

        def action(turns: int = turns) -> None:
            engine.load_weights(0)
            response = partial(engine_response, engine, args.response_tokens)
            Dialogue(num_envs=args.fit_num_envs, turns=turns, rules=args.rules).play(
                bundle, response
            )

        action()
        seconds.append(seconds_of(action, CLOCKS[args.clock], rounds=args.rounds))
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


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--num-envs", type=int, default=128, help="one sixteenth of them with the larger model"
    )
    parser.add_argument(
        "--fit-num-envs", type=int, default=8, help="environments of the second table"
    )
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--response-tokens", type=int, default=13)
    parser.add_argument("--rules", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rounds", type=int, default=3, help="the fastest counts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    use_threads(args.threads)
    built = {}
    for name in args.models:
        bundle = MODELS[name]()
        built[name] = Endless(bundle.model, bundle.tokenizer, bundle.processor)
    print(f"{args.turns} turns, {args.response_tokens} tokens a response, {args.clock} seconds")
    print(f"\n{'':<18}{'':>14}{'engine':>21}{'generate':>21}")
    print(
        f"{'model':<18}{'M':>7}{'envs':>7}{'tokens/s':>12}{'turns/s':>9}{'tokens/s':>12}{'turns/s':>9}{'ratio':>8}"
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
