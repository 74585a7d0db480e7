"""A dialogue that every way to sample plays alike: the trainer's engines, transformers' `generate`, and TRL.

The whole history is shown, the temperature is 1, and the end of a turn cannot be sampled.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import gymnasium
import numpy as np
import torch
from timing import Stopwatch

import ragen_pl.envs
import ragen_pl.visual_envs  # noqa: F401
from ragen_pl.base.seeding import derive_seed
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.protocol import GenerationRequest, Prompt, RolloutEngine, generate
from ragen_pl.engines.vllm.engine import VLLMEngine
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.trajectory import Observation

# by whether the model sees images
ENVIRONMENTS = {False: "ragen/FrozenLake-v0", True: "ragen/FrozenLakeVisual-v0"}
IN_PROCESS, VLLM, GENERATE, TRL = WAYS = ("in-process engine", "vLLM", "generate", "TRL")
Response = Callable[[int, list[Prompt]], list[np.ndarray]]
"""(turn, prompt of each environment) → sampled ids of each environment's response."""


class Endless(ModelBundle):
    """A bundle whose policy cannot end a response before its length limit."""

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """Ids that are never sampled, with those that end a response."""
        return tuple(sorted({*super().banned_token_ids, *self.eos_token_ids}))


def endless(bundle: ModelBundle) -> Endless:
    """Return a model without ends."""
    return Endless(bundle.model, bundle.tokenizer, bundle.processor, bundle.image_settings)


@dataclass(frozen=True, kw_only=True)
class Dialogue:
    """The dialogue that all sides play: optionally an environment's rules, then one observation in each turn.

    Attributes:
        num_envs: Environments side by side; a random walk steps each.
        turns: Turns of each.
        rules: Whether the prompts begin with the environment's rules.
        watch: Takes the seconds in environments, as `environments`.
    """

    num_envs: int
    turns: int
    rules: bool
    watch: Stopwatch

    def play(self, bundle: ModelBundle, response: Response) -> None:
        """Play it with the whole history shown. Images differ by environment and turn, text by turn only."""
        system = "instructions" if self.rules else None
        context = ContextManager(bundle, window="all", system_prompt=system, max_tokens=10**6)
        lakes = environments(ENVIRONMENTS[bundle.image_token_id is not None], self.num_envs)
        conversations = [context.start(lakes[0].instructions) for _ in lakes]
        for turn in range(self.turns):
            with self.watch.timed("environments"):
                shown = [walk(lake, slot, turn) for slot, lake in enumerate(lakes)]
            text, prompts = shown[0].text, []
            for conversation, seen in zip(conversations, shown, strict=True):
                alike = Observation(text=text, images=seen.images)
                prompts.append(context.observe(conversation, alike, max_turns=self.turns))
            for conversation, ids in zip(conversations, response(turn, prompts), strict=True):
                conversation.respond(ids=ids, text="", actions=[])


@cache
def environments(env_id: str, count: int) -> list[Any]:
    """Return environments, which are made once."""
    return [gymnasium.make(env_id).unwrapped for _ in range(count)]


def walk(environment: Any, slot: int, turn: int) -> Observation:
    """Reset an environment in turn 0 and take a random step later; begin anew after an end."""
    over = turn == 0
    if not over:
        rng = np.random.default_rng((slot, turn))
        shown, _, terminated, truncated, _ = environment.step(
            int(rng.integers(environment.action_space.n))
        )
        over = terminated or truncated
    if over:
        shown, _ = environment.reset(seed=1000 * turn + slot)
    if isinstance(shown, str):
        return Observation(text=shown, images=[])
    return Observation(text=shown["text"], images=[shown["image"]])


# ---- ways to sample


@dataclass(kw_only=True)
class Way:
    """A way to sample the responses.

    Attributes:
        respond: Samples the responses of a turn.
        start: Called before each dialogue.
        prefilled: Returns the prompts' tokens that have been computed so far.
    """

    respond: Response
    start: Callable[[], None]
    prefilled: Callable[[], int]


def why_not(way: str, bundle: ModelBundle) -> str | None:
    """Return why this environment can't sample in a way."""
    packages = {VLLM: ("vllm",), TRL: ("trl", "datasets")}.get(way, ())
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if way == VLLM and bundle.facts.family == "ragen_small_vlm":
        return "unknown to vLLM"
    return None


@contextmanager
def opened(way: str, bundle: ModelBundle, *, tokens: int, longest: int) -> Iterator[Way]:
    """Open a way to sample.

    Args:
        way: One of `WAYS`.
        bundle: Model.
        tokens: Tokens of a response.
        longest: Tokens of the longest prompt.
    """
    if way == IN_PROCESS:
        with of_engine(TransformersEngine(PolicyModule(bundle)), tokens) as made:
            yield made
    elif way == VLLM:
        with of_engine(
            VLLMEngine(PolicyModule(bundle), max_tokens=longest + tokens), tokens
        ) as made:
            yield made
    elif way == GENERATE:
        yield of_whole_prompts(partial(generate_response, bundle, tokens))
    else:
        with tempfile.TemporaryDirectory() as folder:
            trainer = trl_trainer(bundle, tokens, folder=folder)
            yield of_whole_prompts(partial(trl_response, bundle, trainer))


@contextmanager
def of_engine(engine: TransformersEngine | VLLMEngine, tokens: int) -> Iterator[Way]:
    """Return the way of an engine, whose caches are kept between turns."""
    try:
        yield Way(
            respond=partial(engine_response, engine, tokens),
            start=lambda: engine.load_weights(0),
            prefilled=lambda: engine.prefilled_tokens,
        )
    finally:
        engine.close()


def of_whole_prompts(respond: Response) -> Way:
    """Return a way that computes whole prompts in every turn."""
    prefilled = 0

    def counted(turn: int, prompts: list[Prompt]) -> list[np.ndarray]:
        nonlocal prefilled
        prefilled += sum(len(prompt.ids) for prompt in prompts)
        return respond(turn, prompts)

    return Way(respond=counted, start=lambda: None, prefilled=lambda: prefilled)


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


def image_inputs(bundle: ModelBundle, prompts: list[Prompt]) -> dict[str, Any]:
    """Return the inputs of the model's forward for prompts of equal length, besides the ids."""
    if bundle.images is None:
        return {}
    inputs: dict[str, Any] = bundle.images.inputs([prompt.images for prompt in prompts])
    ids = torch.from_numpy(np.stack([prompt.ids for prompt in prompts]))
    return inputs | bundle.images.token_types(ids, shown=True)


@torch.inference_mode()
def generate_response(
    bundle: ModelBundle, tokens: int, turn: int, prompts: list[Prompt]
) -> list[np.ndarray]:
    """Return the responses of transformers' `generate` on the whole history."""
    ids = torch.from_numpy(np.stack([prompt.ids for prompt in prompts]))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | image_inputs(
        bundle, prompts
    )
    output = bundle.model.generate(
        **{name: value.to(bundle.device) for name, value in inputs.items()},
        do_sample=True, top_k=0, use_cache=True, suppress_tokens=list(bundle.banned_token_ids),
        min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=bundle.pad_token_id,
    )  # type: ignore[operator]  # fmt: skip
    return list(output[:, ids.shape[1] :].cpu().numpy())


def trl_trainer(bundle: ModelBundle, tokens: int, *, folder: str) -> Any:
    """Return TRL's trainer of GRPO, whose generation is timed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        settings = GRPOConfig(
            output_dir=folder, report_to="none", per_device_train_batch_size=2, num_generations=2,
            use_cpu=bundle.device.type == "cpu", bf16=False, gradient_checkpointing=False,
            temperature=1.0, top_k=0, top_p=1.0, max_completion_length=tokens,
            generation_kwargs={"suppress_tokens": list(bundle.banned_token_ids)},
        )  # fmt: skip
        return GRPOTrainer(
            bundle.model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": ["a", "b"]}),
            processing_class=bundle.processor or bundle.tokenizer,
        )


def trl_response(
    bundle: ModelBundle, trainer: Any, turn: int, prompts: list[Prompt]
) -> list[np.ndarray]:
    """Return the responses of what TRL calls for one turn of its own dialogues."""
    ids = [prompt.ids.tolist() for prompt in prompts]
    images = [prompt.images for prompt in prompts] if bundle.images is not None else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = image_inputs(bundle, prompts)
        responses, _ = trainer._generate_single_turn(ids, images, inputs, num_generations=1)
    return [np.array(response) for response in responses]
