"""Types of the configuration: the keys of nodes without a class path, and their values.

This module is read from source, as the classes that it names are: `Arguments` names constructors, whose arguments are
keys. A node with `_target_` is described by the signature of its class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypedDict

from annotated_types import Ge

from ragen_pl.base.constraints import (
    Arguments,
    ArgumentsOf,
    Count,
    CountOrZero,
    Duration,
    ExistingPath,
    Fraction,
    FractionBelowOne,
    NonNegative,
    Note,
    Open,
    Port,
    Positive,
    PositiveFraction,
    Seed,
)


class Component:
    """An object that is built from a node: `_target_` names its class, whose signature describes the other keys."""


_MANAGER = Arguments(
    # that of a run with one environment is in `rollout`
    "ragen_pl.environments.manager.EnvironmentManager",
    without=("max_response_tokens",),
)


class OneEnvironment(TypedDict, total=False):
    """`env`: besides these keys the arguments of the environments' manager.

    Attributes:
        name: Name of the environment, and of the folder of its runs.
        visual: Whether it shows images.
        words: Words of its texts that become tokens of a small model.
        kwargs: Arguments of the environment.
        command: Command line of an agent program (`env=program`).
        function: Import path of a function in place of a command.
        tasks: Tasks of the program: a file, a folder or an import path.
        validation_tasks: Tasks that training leaves out, or a fraction of `tasks`.
        verifier: Command that is run after the program's end and prints the result.
    """

    name: str
    visual: bool
    words: list[str]
    command: list[str] | None
    function: str | None
    tasks: str | None
    validation_tasks: str | PositiveFraction | None
    verifier: list[str] | None
    kwargs: Annotated[dict[str, Any], ArgumentsOf("target")]


class MixedValidation(TypedDict, total=False):
    """Keys of `validation` that an environment of a mixture has.

    Attributes:
        episodes: Episodes of its validation set.
        held_out: Hold out the initial states of its validation set.
        baselines: Scripted policies that the policy is compared with, by name.
    """

    episodes: Count
    held_out: bool
    baselines: dict[str, Component | None] | None


class MixedWarmStart(TypedDict, total=False):
    """Keys of `warm_start` that an environment of a mixture has.

    Attributes:
        episodes: Number of its demonstrations over all ranks.
        stages: Reset options that they take in turn; null for its own initial states.
        demonstrator: Policy that plays them.
    """

    episodes: Count
    stages: Sequence[dict[str, Any]] | None
    demonstrator: Annotated[dict[str, Any], Open()] | None


class MixedEnvironment(OneEnvironment, TypedDict, total=False):
    """One of `env.environments`: the keys of `env`, and what a run with this environment alone has elsewhere.

    Attributes:
        file: Name of the file of settings in the group `env`.
        curriculum: Harder initial states later on; null for none.
        rewards: Reward functions of its episodes, `algorithm.rewards` with changes.
        validation: Its validation set.
        warm_start: Its demonstrations.
    """

    file: str
    curriculum: Component | None
    rewards: dict[str, Component | None]
    validation: MixedValidation
    warm_start: MixedWarmStart


_MIXED_MANAGER = Arguments("ragen_pl.environments.manager.EnvironmentManager")
_MIXED = Arguments("ragen_pl.data.settings.MixtureSettings")


class Environment(OneEnvironment, TypedDict, total=False):
    """`env` of a run.

    Attributes:
        environments: Environments of a mixture by name, in place of a `target` (`env=mixture`).
        sampling: Rule by which the groups of a mixture are sampled, by success; null for shares that stay.
    """

    environments: dict[str, Annotated[MixedEnvironment, _MIXED_MANAGER, _MIXED]]
    sampling: (
        Annotated[dict[str, Any], Arguments("ragen_pl.data.task_sampling.SamplingRule")] | None
    )


class Algorithm(TypedDict, total=False):
    """`algorithm`.

    Attributes:
        name: Name of the algorithm.
        critic: `shared` for a head on the policy's trunk, `own` for a separate model, or `none`.
        rewards: Reward functions, applied in order; null disables one.
        normalize: Normalization of the returns.
        filter: Selection of the groups for the update.
        estimator: Estimator of advantages.
        masks: Tokens that are trained on.
        loss: Loss of an update step.
    """

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

    Attributes:
        build: Function that builds or loads the model.
        size: Size of a named model.
        config: Its transformers config.
        sizes: Changes to `config` by size.
        processor: Settings of its image processor.
    """

    build: Component
    size: str
    config: dict[str, Any]
    sizes: dict[str, dict[str, Any]]
    processor: dict[str, Any]


class Optimizer(TypedDict, total=False):
    """An optimizer of torch; its other arguments are its own.

    Attributes:
        lr: Highest learning rate.
        betas: Decay rates of the running averages of the gradient and of its square.
        eps: Term added to the divisor, for numerical stability.
        weight_decay: Decay of matrices per step, as a multiple of the learning rate.
    """

    lr: NonNegative
    betas: Sequence[FractionBelowOne]
    eps: Positive
    weight_decay: NonNegative


class Critic(TypedDict, total=False):
    """`critic`: besides this model its settings.

    Attributes:
        build: Another model for `algorithm.critic=own`, with the keys of `model.build`; null for the policy's.
    """

    build: Component | None


class Rollout(TypedDict, total=False):
    """`rollout`: besides its engine the settings of episodes and of iterations.

    Attributes:
        engine: Engine that samples the responses.
        failures: What follows the errors of environments.
    """

    engine: Component
    failures: Annotated[dict[str, Any], Arguments("ragen_pl.rollout.settings.FailureSettings")]


class Validation(TypedDict, total=False):
    """`validation`: besides these keys its settings.

    Attributes:
        warm_start: Evaluate the policy after its warm start too.
        baselines: Scripted players that the policy is compared with, by name.
    """

    warm_start: bool
    baselines: dict[str, Component | None] | None


class WarmStart(TypedDict, total=False):
    """`warm_start`: besides these components its settings.

    Attributes:
        demonstrator: Policy that plays the demonstrations.
        records: Recorded episodes in place of demonstrations; null for demonstrations.
        optimizer: Optimizer of the warm start.
    """

    # an environment's file may set some of its keys where there is no warm start
    demonstrator: Annotated[dict[str, Any], Open()] | None
    records: Annotated[dict[str, Any], Arguments("ragen_pl.data.settings.RecordSettings")] | None
    optimizer: Annotated[Optimizer, Open()]


class ValidationSet(TypedDict, total=False):
    """One of `validation_sets`: its own keys, and changes to the environment's.

    Attributes:
        command: Command line of another agent program.
        function: Import path of another function in place of a command.
        tasks: Other tasks of the program.
        validation_tasks: Other tasks that are played in place of `tasks`.
        verifier: Another command that prints the result.
    """

    command: list[str] | None
    function: str | None
    tasks: str | None
    validation_tasks: str | PositiveFraction | None
    verifier: list[str] | None
    kwargs: Annotated[dict[str, Any], ArgumentsOf("target", "env.target")]


_VALIDATION_SET = Arguments(
    "ragen_pl.evaluation.validation_sets.ValidationSettings", without=("name", "env")
)
_LIGHTNING = Arguments(
    "lightning.pytorch.trainer.trainer.Trainer",
    # set by the run itself, or against its loggers and checkpoints
    without=(
        "barebones", "callbacks", "default_root_dir", "enable_autolog_hparams", "enable_checkpointing",
        "enable_model_summary", "fast_dev_run", "log_every_n_steps", "logger", "model_registry",
        "num_sanity_val_steps", "plugins", "reload_dataloaders_every_n_epochs",
    ),
)  # fmt: skip
# a fraction, or a count
_Limit = Fraction | CountOrZero


class Trainer(TypedDict, total=False):
    """`trainer`: arguments of Lightning's Trainer with bounds that it does not declare.

    The precisions leave out the true half precisions, which would round log-probs, advantages and counts as well;
    `model.build.dtype=bfloat16` does not.

    Attributes:
        accelerator: `auto` for a CUDA GPU if torch finds one, else the CPU.
        devices: Number of GPUs or processes on each machine, or their indices.
        num_nodes: Number of machines.
        strategy: How ranks work together; `auto` for one device or DDP.
        precision: Precision of the forward passes.
        max_epochs: Number of iterations; -1 for no limit.
        gradient_clip_val: Largest norm of the gradient of the policy, and of the critic; null for no limit.
        accumulate_grad_batches: Forward and backward passes that an optimizer step adds up.
        check_val_every_n_epoch: Iterations between two validations; `auto` for a quarter of `max_epochs`, else 20.
        limit_val_batches: Batches, or fraction of the batches, of a validation.
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
    precision: Literal["32-true", "16-mixed", "bf16-mixed", "32", "16", "bf16", 16, 32] | None
    max_epochs: Annotated[int, Ge(-1), Note("iterations")]
    max_time: Duration | None
    limit_train_batches: _Limit | None
    limit_val_batches: _Limit | None
    check_val_every_n_epoch: Count | Literal["auto"] | None
    accumulate_grad_batches: Count
    gradient_clip_val: Positive | None
    gradient_clip_algorithm: Literal["norm"] | None


class _Settings(TypedDict, total=False):
    """The keys of `conf/fit.yaml`, and below them those of the other commands.

    Attributes:
        seed: Seed of the run.
        debug: Show tracebacks instead of one-line errors.
        trust: Whether the checkpoint that is continued may run any code (docs/security.md).
        ckpt_path: Checkpoint to continue: `last` for the newest run of the environment, `auto` for that or a new run,
            or a path; null for a new run.
        curriculum: Harder initial states later on; null for none.
        opponents: Earlier policies in other seats of games; null for the present policy in all.
        logger: Logger of the metrics; null for none.
        callbacks: Callbacks by name; null disables one.
    """

    seed: Seed
    debug: bool
    trust: bool
    ckpt_path: ExistingPath | Literal["last", "auto"] | None
    experiment: dict[str, Any] | None
    paths: Annotated[dict[str, Any], Arguments("ragen_pl.run.settings.PathSettings")]
    env: Annotated[Environment, _MANAGER]
    context: Annotated[dict[str, Any], Arguments("ragen_pl.prompts.context.ContextManager")]
    rollout: Annotated[
        Rollout,
        Arguments("ragen_pl.rollout.settings.EpisodeSettings"),
        Arguments("ragen_pl.data.settings.IterationSettings"),
    ]
    update: Annotated[dict[str, Any], Arguments("ragen_pl.data.settings.UpdateSettings")]
    optimizer: Annotated[Optimizer, Open()]
    critic: Annotated[Critic, Arguments("ragen_pl.modules.settings.CriticSettings")]
    memory: Annotated[dict[str, Any], Arguments("ragen_pl.run.settings.MemorySettings")]
    curriculum: Component | None
    opponents: Component | None
    algorithm: Algorithm
    model: Annotated[Model, Arguments("ragen_pl.models.settings.ModelRules")]
    validation: Annotated[Validation, Arguments("ragen_pl.run.settings.ValidationSettings")]
    warm_start: Annotated[WarmStart, Arguments("ragen_pl.data.settings.WarmStartSettings")]
    callbacks: dict[str, Component | None] | None
    logger: Component | None
    trainer: Annotated[
        Trainer,
        _LIGHTNING,
        Arguments("ragen_pl.run.settings.LimitSettings"),
        Arguments("ragen_pl.run.strategy_rules.StrategyRules"),
    ]

    # evaluate and export
    ckpt: str | None
    to: str | None
    device: Literal["cpu", "cuda", "auto"]
    trajectories: bool
    traces: Annotated[int, Ge(0), Note("episodes of each validation set")]
    mlflow: bool
    adapters: bool
    overwrite: bool
    source: Annotated[dict[str, Any], Arguments("ragen_pl.evaluation.settings.Source")]
    validation_sets: dict[str, Annotated[ValidationSet, _VALIDATION_SET, _MANAGER] | None] | None
    endpoint: Component | None

    # serve_environment
    server: Annotated[dict[str, Any], Arguments("ragen_pl.environments.serving.ServerSettings")]

    # sync, watch and compare
    run: (
        Annotated[ExistingPath, Note("a run's folder")]
        | Sequence[Annotated[ExistingPath, Note("a folder")]]
        | None
    )
    runs: Sequence[Annotated[ExistingPath, Note("a folder")]] | None
    port: Port
    open: bool

    # compare
    with_: (
        Annotated[ExistingPath, Note("a run's folder")]
        | Sequence[Annotated[ExistingPath, Note("a folder")]]
    )

    # import_gguf
    file: ExistingPath
    dtype: Literal["float32", "bfloat16"] | None

    # audit
    groups: Annotated[int, Ge(2), Note("initial states, which the intervals are drawn over")]
    group_size: Annotated[int, Ge(2), Note("episodes from each initial state")]
    continuations: Annotated[int, Ge(2), Note("episodes from each state")]
    algorithms: Sequence[str] | None

    # replay
    batch: Annotated[ExistingPath, Note("a file of a run's bad_batch folder")] | None

    # play, page and watch
    policy: Literal["agent", "endpoint", "human", "random", "optimal"]
    seat: Annotated[int, Ge(0), Note("a seat of a game")] | None
    episode: Annotated[
        int, Ge(0), Note("number of an initial state of the held-out validation set")
    ]
    delay: Annotated[float, Ge(0), Note("seconds")]
    width: Annotated[int, Ge(1), Note("columns")]
    save: str | None
    records: Annotated[ExistingPath, Note("a trajectories.jsonl, or the folder that it is in")]
    title: str | None
    episodes: Annotated[int, Ge(1), Note("approximate number of episodes shown")]


Settings = Annotated[
    _Settings,
    Arguments("ragen_pl.modules.settings.OptimizationSettings"),
    Arguments("ragen_pl.evaluation.sampling.SamplingSettings"),
    Arguments("ragen_pl.evaluation.played.Question"),
    Arguments("ragen_pl.deployment.settings.ServeSettings"),
]
