"""TRL's GRPOTrainer on this project's episodes.

`rollout_func` plays the episodes with this project's environments and prompts. TRL's `_generate_single_turn` samples
the responses of a turn, as in TRL's own loop of tool calls. The update is all TRL's.
"""

from __future__ import annotations

import tempfile
from itertools import count
from typing import Any

import numpy as np
import torch
from alternation import Meter

from ragen_pl.assembly.build import RunComponents, build_datamodule
from ragen_pl.engines.protocol import Generation, GenerationRequest
from ragen_pl.rollout.responders import EngineResponder
from ragen_pl.trajectory import Trajectory

# of TRL's dataset
ITERATIONS = 1000


class TRLEngine:
    """TRL's generation of the responses of a turn.

    Args:
        trainer: GRPOTrainer.
        ends: Ids that end a response.
    """

    continuous = False

    def __init__(self, trainer: Any, ends: tuple[int, ...]) -> None:
        self.trainer, self.ends = trainer, ends
        self.pending: list[GenerationRequest] = []

    def submit(self, requests: list[GenerationRequest], *, keep: bool) -> None:
        """Queue requests."""
        self.pending += requests

    def collect(self, *, wait: bool = True) -> list[tuple[int, Generation]]:
        """Sample all responses together. TRL returns no log-probabilities, and 0 stands for them."""
        requests, self.pending = self.pending, []
        prompts = [request.prompt.ids.tolist() for request in requests]
        responses, _ = self.trainer._generate_single_turn(prompts, None, {}, num_generations=1)
        generations = [
            Generation(
                ids=np.array(ids),
                logprobs=np.zeros(len(ids), np.float32),
                entropy=None,
                hit_length_limit=ids[-1] not in self.ends,
                version=0,
            )
            for ids in responses
        ]
        sessions = [request.session for request in requests]
        return list(zip(sessions, generations, strict=True))

    def release(self) -> None:
        """Forget all requests."""
        self.pending.clear()


def as_completion(trajectory: Trajectory) -> tuple[list[int], list[int], list[int]]:
    """Return an episode as TRL trains on it: the first prompt, all that follows, and 1 where that was sampled.

    Raises:
        ValueError: A prompt does not go on where the last turn ended.
    """
    prompt = trajectory.turns[0].prompt_ids.tolist()
    whole, sampled = list(prompt), []
    for number, turn in enumerate(trajectory.turns):
        shown, response = turn.prompt_ids.tolist(), turn.response_ids.tolist()
        if shown[: len(whole)] != whole:
            raise ValueError(
                f"turn {number + 1}: the prompt does not begin with the last prompt and response, and TRL trains on an "
                "episode as one text; set context.window=all"
            )
        sampled += [0] * (len(shown) - len(whole)) + [1] * len(response)
        whole = shown + response
    return prompt, whole[len(prompt) :], sampled


def settings(parts: RunComponents, folder: str, *, micro_batch: int) -> Any:
    """Return GRPOTrainer's settings that correspond to the config.

    Args:
        parts: Components of a run.
        folder: Folder for what GRPOTrainer writes.
        micro_batch: Most episodes of a forward and backward pass.
    """
    from trl import GRPOConfig

    cfg, update, loss = parts.cfg, parts.cfg["update"], parts.cfg.algorithm.loss
    optimizer, rollout = cfg.optimizer, cfg.rollout
    episodes = rollout.groups * rollout.group_size // update.minibatches
    size = next(n for n in range(min(micro_batch, episodes), 0, -1) if episodes % n == 0)
    passes = episodes // size
    return GRPOConfig(
        output_dir=folder, report_to="none", logging_strategy="no", save_strategy="no", disable_tqdm=True,
        use_cpu=True, bf16=False, gradient_checkpointing=update.gradient_checkpointing,
        max_steps=ITERATIONS * update.epochs * update.minibatches, shuffle_dataset=False, seed=cfg.seed,
        per_device_train_batch_size=size, gradient_accumulation_steps=passes,
        steps_per_generation=passes * update.minibatches, num_iterations=update.epochs,
        num_generations=rollout.group_size, max_completion_length=rollout.max_response_tokens,
        temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k or 0, min_p=rollout.min_p or None,
        generation_kwargs={"suppress_tokens": list(parts.bundle.banned_token_ids)},
        loss_type="grpo", scale_rewards="group", beta=loss.kl.coefficient, epsilon=loss.policy.clip_low,
        epsilon_high=loss.policy.clip_high, learning_rate=optimizer.lr, lr_scheduler_type="constant",
        adam_beta1=optimizer.betas[0], adam_beta2=optimizer.betas[1], adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay, max_grad_norm=cfg.trainer.gradient_clip_val,
    )  # fmt: skip


def trainer_of(parts: RunComponents, meter: Meter, *, folder: str, micro_batch: int) -> Any:
    """Return a GRPOTrainer with the policy's weights, which it reads from a folder.

    Args:
        parts: Components of a run.
        meter: Times the steps; it is asked before each rollout.
        folder: Empty folder.
        micro_batch: Most episodes of a forward and backward pass.

    Raises:
        ValueError: The weights that it has read differ.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    datamodule, iterations = build_datamodule(parts), count()
    rollout, update = parts.cfg.rollout, parts.cfg["update"]

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % (update.epochs * update.minibatches) == 0:
                meter.pause()

    def play(prompts: list[str], trainer: Any) -> dict[str, Any]:
        iteration = next(iterations)
        specs = datamodule.episode_specs(iteration)
        if prompts != [str(iteration * rollout.groups + spec.group) for spec in specs]:
            raise ValueError(f"iteration {iteration}: TRL asks for other groups than are played")
        with meter.rollout():
            engine = TRLEngine(trainer, parts.bundle.eos_token_ids)
            responder = EngineResponder(engine=engine, context=parts.proxy.context)  # type: ignore[arg-type]
            trajectories = parts.proxy.rollout(responder, specs, seed_key=(iteration,))
            samples = [as_completion(trajectory) for trajectory in trajectories]
        meter.note(trajectories)
        prompt_ids, completion_ids, sampled = map(list, zip(*samples, strict=True))
        rewards = [trajectory.reward for trajectory in trajectories]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "env_mask": sampled,
            "logprobs": None,
            "episode_reward": rewards,
        }

    parts.bundle.model.save_pretrained(folder)
    parts.bundle.tokenizer.save_pretrained(folder)
    numbers = [str(number) for number in range(ITERATIONS * rollout.groups)]
    trainer = GRPOTrainer(
        folder,
        reward_funcs=lambda episode_reward, **_: episode_reward,
        args=settings(parts, folder, micro_batch=micro_batch),
        train_dataset=Dataset.from_dict({"prompt": numbers}),
        callbacks=[Steps()],
        rollout_func=play,
    )
    check_equal(parts.bundle.model, trainer.model)
    return trainer


def check_equal(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """Check that two models have the same weights.

    Raises:
        ValueError: They don't.
    """
    mine, other = ours.state_dict(), theirs.state_dict()
    differing = sorted(mine.keys() ^ other.keys()) + sorted(
        name for name in mine.keys() & other.keys() if not torch.equal(mine[name], other[name])
    )
    if differing:
        raise ValueError(f"{len(differing)} weights of TRL's model differ, {differing[0]} first")


def train(parts: RunComponents, *, micro_batch: int) -> None:
    """Train with TRL until the process is ended. The arguments are those of `trainer_of`."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        trainer_of(parts, Meter(), folder=folder, micro_batch=micro_batch).train()
