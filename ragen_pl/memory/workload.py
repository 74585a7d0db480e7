"""Sizes of a run's batches, from its config: numbers and lengths of samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from omegaconf import DictConfig, OmegaConf

from ragen_pl.assembly.build import build_environments
from ragen_pl.config.environments import environment_configs
from ragen_pl.config.errors import ConfigError
from ragen_pl.config.nodes import plain
from ragen_pl.config.relations import ranks_asked_for
from ragen_pl.environments.manager import EpisodeSpec
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.prompts.context import ContextManager

# without a tokenizer: text that a template puts around a message, and letters of a token
_TEMPLATE_TOKENS = 12
_LETTERS = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Sizes of the batches that a run computes on one device.

    Attributes:
        episodes: Episodes that are played at once.
        prompt: Tokens of a prompt, those of images included.
        response: Tokens of a response.
        rows: Samples of a microbatch.
        length: Tokens of a sample.
        sampled: Tokens of a sample that the policy sampled.
        images: Images of a sample, uint8 `[height, width, 3]`.
        new_images: Images that a turn adds.
        all_images: Images of an iteration.
        samples: Samples of an iteration.
        accumulates: Whether an optimizer step adds the gradients of several microbatches.
    """

    episodes: int
    prompt: int
    response: int
    rows: int
    length: int
    sampled: int
    images: tuple[np.ndarray, ...] = ()
    new_images: int = 0
    all_images: int = 0
    samples: int = 1
    accumulates: bool = False


def workload_of(cfg: DictConfig, bundle: ModelBundle) -> Workload:
    """Return the sizes if every episode and every response is as long as it may be.

    A prompt has the length of the environment's first observation. It is estimated where the tokenizer is not here. In
    a mixture they are those of the environment with the most tokens, as if all episodes were in it.
    """
    workloads = [_alone(one, bundle) for one in environment_configs(cfg).values()]
    return max(workloads, key=lambda one: one.samples * one.length)


def _alone(cfg: DictConfig, bundle: ModelBundle) -> Workload:
    """Return the sizes of a run with one environment."""
    rollout, turns, whole = cfg.rollout, cfg.env.max_turns, cfg.context.window == "all"
    system, turn, images, grows = _prompt(cfg, bundle)
    response, max_tokens = rollout.max_response_tokens, cfg.context.max_tokens
    # earlier turns are dropped where the context has no room for them
    room = max(1, (max_tokens - system) // (turn + response))
    window = min(turns if whole else cfg.context.window, turns, room)
    prompt = min(system + window * turn + (window - 1) * response, max_tokens - response)
    episodes = math.ceil(rollout.groups / ranks_asked_for(cfg)) * rollout.group_size
    kept = OmegaConf.select(cfg, "algorithm.filter.keep.fraction") or 1.0
    samples = episodes * kept * _samples_of_episode(cfg, window, grows=grows)
    accumulated = cfg.trainer.accumulate_grad_batches
    minibatch = max(1, math.ceil(samples / cfg["update"].minibatches / accumulated))
    return Workload(
        episodes=min(rollout.num_envs, episodes),
        prompt=prompt,
        response=response,
        rows=rows_at_once(cfg, minibatch, prompt + response),
        length=prompt + response,
        sampled=min(response * (window if grows else 1), prompt + response - 1),
        images=images * window,
        new_images=len(images),
        all_images=episodes * turns * len(images),
        samples=math.ceil(samples),
        accumulates=accumulated > 1 or rows_at_once(cfg, minibatch, prompt + response) < minibatch,
    )


def _samples_of_episode(cfg: DictConfig, window: int, *, grows: bool) -> int:
    """Return the number of samples of an episode: of each turn one, unless a prompt continues the one before it.

    Args:
        cfg: Config of a run with one environment.
        window: Turns that a prompt shows.
        grows: Whether a prompt continues the one before it; after a summary another sample begins.
    """
    turns: int = cfg.env.max_turns
    if not grows:
        return turns
    return math.ceil(turns / window) if cfg.context.compaction is not None else 1


def rows_at_once(cfg: DictConfig, rows: int, length: int) -> int:
    """Return how many of a minibatch's rows of this length one forward and backward pass has."""
    tokens = cfg["update"].tokens_per_microbatch
    return rows if tokens is None else min(rows, max(1, tokens // length))


def _prompt(cfg: DictConfig, bundle: ModelBundle) -> tuple[int, int, tuple[np.ndarray, ...], bool]:
    """Return the tokens of the system prompt, tokens and images of a turn, and whether a prompt continues the last one.

    Raises:
        ConfigError: The environment fails.
    """
    environments = build_environments(cfg.env)
    (slot,) = environments.open([EpisodeSpec(group=0, member=0, seed=0)])
    if slot.observation is None:
        raise ConfigError(f"env.target={cfg.env.target}: {slot.error}")
    observation, images = slot.observation, tuple(slot.observation.images)
    instructions, tools = environments.instructions(slot), environments.tools(slot)
    environments.close([slot])
    if bundle.renderer.chat_template:
        context = ContextManager(bundle, **plain(cfg.context))
        conversation = context.start(instructions, tools=tools)
        ids = context.observe(conversation, observation, max_turns=cfg.env.max_turns).ids
        system = len(conversation.system_prompt_ids)
        if context.window != 1 and not context.template.is_static:
            # rendered as a whole: a turn is what a second one adds
            response = context.encode_response("x")
            conversation.respond(ids=response, text="x", actions=[])
            longer = context.observe(conversation, observation, max_turns=cfg.env.max_turns).ids
            system = 2 * len(ids) + len(response) - len(longer)
        return system, len(ids) - system, images, context.grows
    text = cfg.context.system_prompt
    system = _estimated_tokens(instructions if text == "instructions" else text)
    of_images = sum(bundle.num_image_tokens(image) for image in images)
    turn = _estimated_tokens(observation.text) + of_images
    return system, turn, images, cfg.context.window == "all"


def _estimated_tokens(text: str | None) -> int:
    return _TEMPLATE_TOKENS + math.ceil(len(text) / _LETTERS) if text else 0
