"""Settings of an iteration, its update and the warm start; read without torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from omegaconf import DictConfig

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count, CountOrZero, Fraction, NonNegative, Positive

IterationsAhead = Literal[0, 1]
"""Largest number of updates between the weights that sample a rollout and those that are trained on it."""


@checked
@dataclass(frozen=True, kw_only=True)
class IterationSettings:
    """Keys of `rollout` that a `RolloutDataModule` collects an iteration with.

    Attributes:
        groups: Number of groups of an iteration over all ranks.
        group_size: Number of episodes of a group, all from the same initial state.
        iterations_ahead: 1 to sample an iteration's rollout while the iteration before it trains, with weights one
            update older; 0 to sample it with present weights.
        leave_out_user_errors: Whether the agent is not trained on episodes whose simulated user has made an error.
    """

    groups: Count = 128
    group_size: Count = 1
    iterations_ahead: IterationsAhead = 0
    leave_out_user_errors: bool = False


@checked
@dataclass(frozen=True, kw_only=True)
class MixtureSettings:
    """Keys of one of `env.environments`, beside those of its manager.

    Attributes:
        share: Share of the groups, and of the tokens' weight in the loss; shares need not add up to 1. One with 0 is
            not played in training, and validated.
    """

    share: NonNegative = 1.0

    @staticmethod
    def config_problems(cfg: DictConfig, *, ranks: int | None) -> Iterator[str]:
        """Yield what does not work in a mixture, or is not read there; see `EngineTraits`."""
        key, env = "env.environments", cfg.env
        if not any(own.share > 0 for own in env.environments.values()):
            yield f"{key}: every share is 0, and nothing would be trained; set one above 0"
        for name in env:
            if name not in ("name", "visual", "prompt_format", "environments", "words", "sampling"):
                yield f"env.{name}: is not read in a mixture; set it in one of {key}, such as {{share: 1, {name}: …}}"
        for name, own in env.environments.items():
            place = f"{key}.{name}"
            if not re.fullmatch(r"[\w-]+", str(name)) or name == "reward":
                yield f"{place}: metrics and folders are named after it; use letters, digits, _ and -, and not reward"
            if "command" in own:
                yield f"{place}: is an agent program, which a mixture can't play; train it by itself (env=program)"
            if bool(own.get("visual")) != bool(env.get("visual")):
                yield (
                    f"{place}.visual={str(bool(own.get('visual'))).lower()}: all environments of a mixture show images "
                    "(env.visual=true model=small_vlm), or none does; choose others"
                )
            if (own.get("prompt_format") == "native") != (env.get("prompt_format") == "native"):
                yield (
                    f"{place}.prompt_format={own.get('prompt_format')}: with env.prompt_format="
                    f"{env.get('prompt_format')}, but either all responses are in the model's own format or none is; "
                    "set both to native, or neither"
                )
        if cfg.get("curriculum"):
            yield f"curriculum: is not read in a mixture; set that of an environment, {key}.<name>.curriculum"
        if (cfg.get("warm_start") or {}).get("records") and cfg.warm_start.get("enabled"):
            yield (
                "warm_start=records: initial states of records are known for one environment only; set "
                "warm_start=demonstrations, or warm_start.weights=FILE"
            )
        if (cfg.get("validation") or {}).get("blank"):
            yield "validation.blank=true: is not measured in a mixture; set false, and evaluate each environment"
        if any(((cfg.get("context") or {}).get("leave_out") or {}).values()):
            yield "context.leave_out: does not work in a mixture; set patches=0 and turns=0"


@checked
@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """Keys of `update`.

    Attributes:
        epochs: Passes over an iteration's samples in its update.
        minibatches: Optimizer steps of a pass.
        tokens_per_microbatch: Positions of a forward and backward pass, padding included; None for a whole minibatch.
        length_buckets: Largest number of forward passes of a minibatch, by length, without `tokens_per_microbatch`;
            None: 6 on a CPU, and 1 on a GPU, which computes padding sooner than it launches another pass.
        gradient_checkpointing: Compute the activations of each layer again in the backward pass, in train mode: less
            memory, a third slower.
        share_prefix: Compute what several samples of a forward pass begin with once, images included: a system prompt,
            the prompt of a group, earlier turns of an episode. Not with sharded weights, sliding windows, states of
            layers, images read both ways or dropout.
        packed: Compute the samples of a forward pass one after the other without padding, where that is exact; None: on
            a GPU in 16 bits. Not with sharded weights, sliding windows, states of layers or images read both ways.
        freeze_vision: Leave the image encoder as it is after the warm start, so that an image is encoded once.
        tokens_per_forward: Positions of a forward pass that scores an iteration before its update, padding included.
        scoring: When the policy scores an iteration before its update: `needed` if credit or loss read the scores, that
            is with a critic whose values the engine has not read, a KL penalty in the reward, truncated sampling, a
            correction of the engine's distribution, `top_entropy`, `entropy_target`, `echo` or masks over shown text.
            Otherwise `rollout/policy_entropy` and `rollout/logprob_mismatch` are those of the first step; `always` for
            those of all.
        max_skipped_steps: Steps in a row with a gradient or loss that is not finite, which end the run; 1% of the last
            1,000 do too.
        max_mismatch: Mean difference of the log-probs of engine and trainer, in nats a token, above which the run ends
            where both compute alike: in float32 with an exact engine, such as `transformers`; None for no limit.
        logits_mib: MiB of float32 logits that the head computes at a time; it takes about four times as much.
    """

    epochs: Count = 2
    minibatches: Count = 4
    tokens_per_microbatch: Count | None = None
    length_buckets: Count | None = None
    gradient_checkpointing: bool = False
    share_prefix: bool = True
    packed: bool | None = None
    freeze_vision: bool = False
    tokens_per_forward: Count = 16_384
    scoring: Literal["needed", "always"] = "needed"
    max_skipped_steps: Count = 3
    max_mismatch: Positive | None = 0.01
    logits_mib: Positive = 512


@checked
@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """Keys of `warm_start.records`: the recorded episodes that a warm start learns from, and their weights.

    Attributes:
        path: Folder of records (`trajectories.jsonl` in it or below) or a file of conversations (JSONL, each line with
            `messages`); or a list of several.
        rule: Weights of the episodes, see `record_weights`: `success` takes the solved ones, `threshold` those with a
            return of `threshold` or more, `best` the `best` highest returns from each initial state, `exponential` all,
            by their return, `all` all alike.
        threshold: Lowest return of `threshold` and `best`; None for any.
        best: Number of episodes from each initial state that `best` takes.
        temperature: Difference in return by which `exponential` raises a weight e-fold.
        cap: Largest weight of `exponential`, as a multiple of that of the mean return.
        per_group: Whether all initial states count alike, however many of their episodes are taken.
        episodes: Number of the taken episodes that are drawn at random, from the run's seed; None for all.
        turns: Turns that the policy learns: `valid` leaves out responses without a valid action, `effective` also those
            that changed nothing, `all` none.
        held_out: What is done about episodes of validation sets, or from initial states of the run's own: `refuse`
            ends the run, `skip` leaves them out. Either says how many they are.
    """

    path: str | Sequence[str] | None = None
    rule: Literal["all", "success", "threshold", "best", "exponential"] = "success"
    threshold: float | None = None
    best: Count = 1
    temperature: Positive = 1.0
    cap: Positive = 20.0
    per_group: bool = False
    episodes: Count | None = None
    turns: Literal["all", "valid", "effective"] = "valid"
    held_out: Literal["refuse", "skip"] = "refuse"

    @property
    def paths(self) -> list[Path]:
        """Files and folders of `path`."""
        given = [self.path] if isinstance(self.path, str) else self.path or []
        return [Path(path).expanduser() for path in given]

    @staticmethod
    def config_problems(cfg: DictConfig, *, ranks: int | None) -> Iterator[str]:
        """Yield records that are not there, or that the run's prompts can't be compared with; see `EngineTraits`."""
        node = cfg.get("warm_start") or {}
        records = node.get("records")
        if not records or not node.get("enabled") or node.get("weights") is not None:
            return
        if records.get("rule") == "threshold" and records.get("threshold") is None:
            yield "warm_start.records.threshold=null: the rule threshold needs the lowest return; set a number"
        leave_out = (cfg.get("context") or {}).get("leave_out")
        if leave_out and any(leave_out.values()):
            yield (
                "context.leave_out: what a prompt leaves out depends on the policy that acts, so prompts of records "
                "can't be made again; set its fractions to 0, or warm_start=demonstrations"
            )
        env = cfg.get("env") or {}
        if env.get("command") or env.get("function"):
            yield (
                "warm_start=records: records of agent programs do not hold their requests, and prompts can't be made "
                "again; set warm_start=none, or warm_start=demonstrations warm_start.weights=FILE"
            )


@checked
@dataclass(frozen=True, kw_only=True)
class WarmStartSettings:
    """Keys of `warm_start`, without its demonstrator, its records and its optimizer.

    Attributes:
        enabled: Whether the policy learns from demonstrations or records first.
        weights: Initial weights instead of them: `warm_start.pt` or a checkpoint of another run; None to learn some.
        episodes: Number of demonstrations over all ranks.
        stages: Reset options that the demonstrations take in turn, none for the environment's own initial states:
            `[{}, {"min_distance": 3}]`; None for those states only. Recorded episodes may have begun with any of them.
        steps: Number of optimizer steps, the length of the cosine decay.
        batch_size: Number of samples of an optimizer step over all ranks.
        gamma: Discount per turn of the critic's target.
        value_coefficient: Weight of half the squared value error.
        warm_up: Number of first steps with a rising learning rate.
        checkpoint_every_n_steps: Steps between checkpoints for resuming an interrupted warm start; None for none.
        learning_rate_end: Learning rate at the last step as a fraction of the highest.
        critic_lr: Highest learning rate of the critic; None for the policy's.
    """

    enabled: bool = True
    weights: str | None = None
    episodes: Count = 4096
    stages: Sequence[Mapping[str, object]] | None = None
    steps: Count = 400
    batch_size: Count = 64
    gamma: Fraction = 0.9
    value_coefficient: NonNegative = 2.0
    warm_up: CountOrZero = 20
    checkpoint_every_n_steps: Count | None = 100
    learning_rate_end: Fraction = 0.05
    critic_lr: NonNegative | None = None

    @staticmethod
    def config_problems(cfg: DictConfig, *, ranks: int | None) -> Iterator[str]:
        """Yield weights that are not read, or a warm start without demonstrations for each rank; see `EngineTraits`."""
        node = cfg.get("warm_start") or {}
        if not node.get("enabled"):
            if (weights := node.get("weights")) is not None:
                yield (
                    f"warm_start.weights={weights}: is not read, since warm_start.enabled=false; set "
                    "warm_start=demonstrations or warm_start.enabled=true, or leave it out"
                )
            return
        if node.get("records"):
            return
        if not (node.get("demonstrator") or {}).get("_target_"):
            yield (
                "warm_start.demonstrator has no _target_, the policy that plays; set warm_start/demonstrator=random or "
                "noisy, or warm_start=none"
            )
        episodes = node.get("episodes")
        if episodes is not None and ranks is not None and episodes < ranks:
            trainer = cfg.trainer
            yield (
                f"warm_start.episodes={episodes}: fewer than the {ranks} ranks of trainer.devices={trainer.devices} "
                f"trainer.num_nodes={trainer.get('num_nodes')}; set at least {ranks}"
            )
