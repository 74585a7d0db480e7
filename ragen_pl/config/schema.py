"""Types of the configuration: the keys of nodes without a class path, and their values.

The signature of a constructor describes its arguments. `Arguments` names the constructors, and their signatures are
read from source. A node with `_target_` is described by the signature of its class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

from annotated_types import Ge, Gt, Le

from ragen_pl.constraints import (
    Built,
    Count,
    CountOrZero,
    ExistingPath,
    Fraction,
    FractionBelowOne,
    Matches,
    NonNegative,
    Note,
    Open,
    Positive,
    PositiveFraction,
    Seed,
)


@dataclass(frozen=True)
class Arguments:
    """Metadata of a node whose keys are arguments of a constructor.

    Args:
        target: the constructor's class path; its keyword-only arguments are keys.
    """

    target: str


@dataclass(frozen=True)
class ArgumentsOf:
    """Metadata of a node whose keys are arguments of the class that another setting names.

    Args:
        sibling: setting in the same parent that names the class.
        default: full name of the setting that names the class if there is no such sibling.
    """

    sibling: str
    default: str = ""


Component = Annotated[dict[str, Any], Open(), Built()]
"""A node with `_target_`, described by the signature of its class."""

_MANAGER = Arguments("ragen_pl.rollout.environments.EnvironmentManager")


class Environment(TypedDict, total=False):
    """`env`: besides these keys the arguments of the environments' manager."""

    name: str
    visual: bool
    words: list[str]
    kwargs: Annotated[dict[str, Any], ArgumentsOf("target")]


class Algorithm(TypedDict, total=False):
    """`algorithm`."""

    name: str
    critic: Literal["shared", "own", "none"]
    rewards: dict[str, Component | None]
    normalize: Component | None
    filter: Component | None
    estimator: Component
    masks: Component
    loss: Component


class Model(TypedDict, total=False):
    """`model`: how it is built; of a named model also its sizes, from which the memory is planned.

    `sizes` has what a size changes in `config`, which is a transformers config. `processor` has settings of the image
    processor.
    """

    build: Component
    size: str
    config: dict[str, Any]
    sizes: dict[str, dict[str, Any]]
    processor: dict[str, Any]


class Optimizer(TypedDict, total=False):
    """An optimizer of torch; its other arguments are its own."""

    lr: NonNegative
    betas: Sequence[FractionBelowOne]
    eps: Positive
    weight_decay: NonNegative


class Critic(TypedDict, total=False):
    """`critic`: settings of the critic that `algorithm.critic` chooses."""

    lr: NonNegative | None
    detach: bool
    build: Component | None


class Memory(TypedDict, total=False):
    """`memory`: the plan of a run's memory."""

    check: bool
    device_gb: Positive | None


class Rollout(TypedDict, total=False):
    """`rollout`: besides its engine the settings of episodes and of iterations."""

    engine: Component


class Validation(TypedDict, total=False):
    """`validation`."""

    episodes: Count
    held_out: bool
    blank: bool
    warm_start: bool
    baselines: dict[str, Component | None] | None


class WarmStart(TypedDict, total=False):
    """`warm_start`: besides these components its settings."""

    # an environment's file may set some of its keys where there is no warm start
    demonstrator: Annotated[dict[str, Any], Open()] | None
    optimizer: Annotated[Optimizer, Open()]


class ValidationSet(TypedDict, total=False):
    """One of `validation_sets`: its own keys, and changes to the environment's."""

    episodes: Count
    key: str
    options: dict[str, Any] | None
    kwargs: Annotated[dict[str, Any], ArgumentsOf("target", "env.target")]


class Paths(TypedDict, total=False):
    """`paths`."""

    root: str
    run_dir: str | None


class Source(TypedDict, total=False):
    """`source`: origin of the weights, set by `ragen_pl.evaluate`."""

    checkpoint: str | None
    run: str | None
    environment: str | None
    held_out: CountOrZero
    untrained: bool


# a share, or a count
_Limit = Fraction | CountOrZero
_Duration = Annotated[
    str, Matches(r"\d+:\d+:\d+:\d+", "00:12:00:00 (days, hours, minutes, seconds)")
]


class Trainer(TypedDict, total=False):
    """`trainer`: keyword arguments of `lightning.Trainer` (2.6), and `timeout_s`, the process group's.

    Arguments that the run sets itself are left out: logger, callbacks, num_sanity_val_steps, enable_model_summary,
    log_every_n_steps, default_root_dir. The precisions leave out the true half precisions, which would round
    log-probs, advantages and counts as well; `model.build.dtype=bfloat16` does not.
    """

    accelerator: Literal["auto", "cpu", "gpu", "cuda"]
    devices: Count | Literal["auto", -1] | Sequence[CountOrZero]
    num_nodes: Count
    strategy: (
        Literal[
            "auto",
            "ddp",
            "ddp_find_unused_parameters_true",
            "ddp_find_unused_parameters_false",
            "ddp_spawn",
            "fsdp",
            "fsdp_cpu_offload",
            "fsdp2",
            "deepspeed",
            "deepspeed_stage_1",
            "deepspeed_stage_2",
            "deepspeed_stage_2_offload",
            "deepspeed_stage_3",
            "deepspeed_stage_3_offload",
        ]
        | Component
    )
    timeout_s: Annotated[float, Gt(0), Note("seconds")]
    precision: Literal["32-true", "16-mixed", "bf16-mixed", "32", "16", "bf16", 16, 32] | None
    fast_dev_run: bool | CountOrZero
    max_epochs: Annotated[int, Ge(-1), Note("iterations")]
    min_epochs: CountOrZero | None
    max_steps: Annotated[int, Ge(-1)]
    min_steps: CountOrZero | None
    max_time: _Duration | None
    limit_train_batches: _Limit | None
    limit_val_batches: _Limit | None
    limit_test_batches: _Limit | None
    limit_predict_batches: _Limit | None
    overfit_batches: _Limit | None
    val_check_interval: PositiveFraction | Count | None
    check_val_every_n_epoch: Count | None
    enable_checkpointing: bool
    enable_progress_bar: bool
    accumulate_grad_batches: Count
    gradient_clip_val: Positive | None
    gradient_clip_algorithm: Literal["norm"] | None
    deterministic: bool | Literal["warn"] | None
    benchmark: bool | None
    inference_mode: bool
    use_distributed_sampler: bool
    profiler: Literal["simple", "advanced", "pytorch", "xla"] | None
    detect_anomaly: bool
    barebones: bool
    sync_batchnorm: bool


class _Settings(TypedDict, total=False):
    """The keys of `conf/fit.yaml`, and below them those of the other commands."""

    seed: Seed
    debug: bool
    trust: bool
    ckpt_path: Annotated[str, ExistingPath()] | Literal["last", "auto"] | None
    experiment: dict[str, Any] | None
    paths: Paths
    env: Annotated[Environment, _MANAGER]
    context: Annotated[dict[str, Any], Arguments("ragen_pl.rollout.context.ContextManager")]
    rollout: Annotated[
        Rollout,
        Arguments("ragen_pl.rollout.settings.EpisodeSettings"),
        Arguments("ragen_pl.data.settings.IterationSettings"),
    ]
    update: Annotated[dict[str, Any], Arguments("ragen_pl.data.settings.UpdateSettings")]
    optimizer: Annotated[Optimizer, Open()]
    critic: Critic
    memory: Memory
    curriculum: Component | None
    algorithm: Algorithm
    model: Model
    validation: Validation
    warm_start: Annotated[WarmStart, Arguments("ragen_pl.data.settings.WarmStartSettings")]
    callbacks: dict[str, Component | None] | None
    logger: Component | None
    trainer: Trainer

    # evaluate and export
    ckpt: str | None
    to: str | None
    samples: Annotated[int, Ge(1), Note("episodes from each initial state")]
    greedy: bool | None
    pass_at: Sequence[Count] | None
    device: Literal["cpu", "cuda", "auto"]
    trajectories: bool
    traces: Annotated[int, Ge(0), Note("episodes of each validation set")]
    mlflow: bool
    adapters: bool
    overwrite: bool
    source: Source
    validation_sets: dict[str, Annotated[ValidationSet, _MANAGER] | None] | None
    endpoint: Component | None

    # sync and watch
    run: Annotated[str, ExistingPath(), Note("a run's folder")] | None
    runs: Sequence[Annotated[str, ExistingPath(), Note("a folder")]] | None
    port: Annotated[int, Ge(0), Le(65535), Note("a port of 127.0.0.1")]
    open: bool

    # import_gguf
    file: Annotated[str, ExistingPath()]
    dtype: Literal["float32", "bfloat16"] | None

    # replay
    batch: Annotated[str, ExistingPath(), Note("a file of a run's bad_batch folder")] | None

    # play, page and watch
    policy: Literal["agent", "endpoint", "human", "random", "optimal"]
    episode: Annotated[
        int, Ge(0), Note("number of an initial state of the held-out validation set")
    ]
    delay: Annotated[float, Ge(0), Note("seconds")]
    width: Annotated[int, Ge(1), Note("columns")]
    save: str | None
    records: Annotated[
        str, ExistingPath(), Note("a trajectories.jsonl, or the folder that it is in")
    ]
    title: str | None
    episodes: Annotated[int, Ge(1), Note("approximate number of episodes shown")]


Settings = Annotated[_Settings, Arguments("ragen_pl.modules.settings.OptimizationSettings")]
