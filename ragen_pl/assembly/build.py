"""Build the objects of a run from its config, which names their classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from hydra.utils import instantiate
from lightning.pytorch.loggers.logger import Logger
from omegaconf import DictConfig, OmegaConf

from ragen_pl.algorithms.credit import Estimator
from ragen_pl.assembly.start_check import checked_engine_factory, engine_class, engine_factory
from ragen_pl.base.instances import instances
from ragen_pl.base.prompt_formats import PromptFormat
from ragen_pl.base.seeding import derive_seed, seeded
from ragen_pl.config.environments import environment_configs, environment_nodes, is_mixture
from ragen_pl.config.errors import ConfigError, config_errors
from ragen_pl.config.nodes import plain
from ragen_pl.config.settings import read_settings
from ragen_pl.data.datamodule import RolloutDataModule
from ragen_pl.data.demonstrations import DemonstrationDataModule, WarmStartDataModule
from ragen_pl.data.settings import (
    IterationSettings,
    RecordSettings,
    UpdateSettings,
    WarmStartSettings,
)
from ragen_pl.data.validation import HELD_OUT, ValidationSet
from ragen_pl.engines.protocol import EngineFactory, RolloutEngine
from ragen_pl.environments.calls import manager_settings
from ragen_pl.environments.classes import frequent_words
from ragen_pl.environments.manager import EnvironmentManager
from ragen_pl.models.merging import check_merging
from ragen_pl.modules.agent import AgentModule
from ragen_pl.modules.critic import CriticModule
from ragen_pl.modules.losses import UpdateLoss
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.modules.reference import ChecksPolicy
from ragen_pl.modules.settings import CriticSettings, OptimizationSettings
from ragen_pl.modules.warm_start import WarmStartModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.prompts.conversation import Context
from ragen_pl.prompts.hint import Hint
from ragen_pl.rollout.proxy import AgentProxy, truncation_of
from ragen_pl.rollout.settings import EpisodeSettings, FailureSettings
from ragen_pl.tracking.loggers import KeepsRecord, RecordLogger

if TYPE_CHECKING:
    from ragen_pl.checkpoints.folder import Run
    from ragen_pl.data.mixture import Mixture
    from ragen_pl.data.opponents import Opponents
    from ragen_pl.models.bundle import ModelBundle
    from ragen_pl.rollout.endpoint import ChatEndpoint


ContextT = TypeVar("ContextT", bound=Context)


@dataclass(slots=True)
class RunComponents:
    """Objects that the phases of a run share."""

    cfg: DictConfig
    bundle: ModelBundle
    policy: PolicyModule
    critic: CriticModule | None
    proxy: AgentProxy[ContextManager]
    validation_sets: list[ValidationSet]


def assemble(cfg: DictConfig) -> RunComponents:
    """Build model, policy, critic, environments, contexts and validation sets."""
    bundle = build_bundle(cfg)
    check_merging(bundle.model)
    loss: UpdateLoss = instantiate(cfg.algorithm.loss, _convert_="all")
    reference: object = loss.reference
    if isinstance(reference, ChecksPolicy):
        reference.check(bundle)
    policy = build_policy(bundle, cfg["update"])
    estimator: Estimator = instantiate(cfg.algorithm.estimator, _convert_="all")
    context = build_context(bundle, cfg.context)
    if _predicts_text(cfg):
        context.record_roles()
    of_environments = environment_configs(cfg)
    managers = {
        name: build_environments(
            alone.env,
            record_states=estimator.needs_states,
            record_potentials=estimator.needs_potentials
            or OmegaConf.select(alone, "algorithm.rewards.shaping") is not None,
            record_plans=loss.hint is not None and "plan" in loss.hint.fields,
            max_response_tokens=alone.rollout.max_response_tokens,
        )
        for name, alone in of_environments.items()
    }
    mixed = is_mixture(cfg.env)
    environments = _mixed(managers) if mixed else managers[cfg.env.name]
    proxy = build_proxy(cfg.rollout, environments=environments, context=context, hint=loss.hint)
    engine = engine_class(cfg.rollout.engine)
    if engine is not None and engine.in_place:
        # the engine refuses here what it can't run, and not after a warm start
        engine_factory(cfg.rollout.engine)(policy)
    validation_sets = [
        build_validation_set(
            proxy,
            alone.env,
            episodes=alone.validation.episodes,
            environment=name if mixed else None,
            keeps_states=alone.validation.held_out and alone.env.get("held_out_fraction") is None,
            max_response_tokens=alone.rollout.max_response_tokens,
        )
        for name, alone in of_environments.items()
    ]
    return RunComponents(cfg, bundle, policy, build_critic(cfg, bundle), proxy, validation_sets)


def _mixed(managers: Mapping[str, EnvironmentManager]) -> EnvironmentManager:
    from ragen_pl.environments.mixture import EnvironmentMixture

    return EnvironmentMixture(managers)


def _predicts_text(cfg: DictConfig) -> bool:
    """Whether the loss reads the environment's text (ECHO)."""
    return cfg.algorithm.loss.get("echo") is not None


def build_validation_set(
    proxy: AgentProxy[ContextManager],
    env: DictConfig,
    *,
    episodes: int,
    environment: str | None = None,
    keeps_states: bool = True,
    **changes: Any,
) -> ValidationSet:
    """Build the held-out validation set, in environments of the node `env` with `changes` to their settings.

    Args:
        proxy: Plays a run's episodes.
        env: The node.
        episodes: Number of initial states.
        environment: Name of the environment in a mixture; None for a run's only one.
        keeps_states: Whether training leaves out its initial states.
        changes: Settings of the environments' manager.
    """
    # a comparison takes episodes from equal states together
    environments = build_environments(env, record_states=True, **changes)
    return ValidationSet(
        environment or HELD_OUT,
        replace(proxy, environments=environments, hint=None),
        episodes=episodes,
        keeps_states=keeps_states,
        environment=environment is not None,
    )


def with_words(cfg: DictConfig) -> DictConfig:
    """Return a config whose `model.build.words` are those of the environment's class where they are null.

    A model without `model.build.words` has a vocabulary of its own, and its config is returned as it is.

    Raises:
        ConfigError: The class can't be found, or declares something else than texts.
    """
    build = cfg.model.build
    if "words" not in build or build.words is not None:
        return cfg
    words: list[str] = []
    for env in environment_nodes(cfg.env).values():
        with config_errors(f"env.target={env.target}"):
            words += [word for word in frequent_words(env.target) if word not in words]
    changed = OmegaConf.merge(cfg, {"model": {"build": {"words": words}}})
    assert isinstance(changed, DictConfig)
    return changed


def build_bundle(cfg: DictConfig) -> ModelBundle:
    """Build or load the model.

    Raises:
        ConfigError: The environment's class, whose words a small model's tokens are, can't be found.
    """
    # cuDNN rounds what convolutions of float32 read to 10 bits by default, and with it the patches of images
    torch.backends.cudnn.allow_tf32 = False
    # cuDNN's attention, which torch prefers on Hopper, plans for milliseconds to seconds at each new shape, and shapes
    # change with each token and each microbatch; of the whole process, for recomputation in backward leaves a context
    torch.backends.cuda.enable_cudnn_sdp(False)
    bundle: ModelBundle = instantiate(with_words(cfg).model.build, _convert_="all")
    # the environments of a mixture agree in it
    bundle.calls_tools = OmegaConf.select(cfg, "env.prompt_format") == PromptFormat.NATIVE
    return bundle


def build_policy(bundle: ModelBundle, update: DictConfig) -> PolicyModule:
    """Build the policy of a model, with the settings of the node `update`."""
    return PolicyModule(bundle, update=read_settings(UpdateSettings, update))


def build_context(bundle: ModelBundle, context: DictConfig) -> ContextManager:
    """Build what writes the prompts of a model, with the settings of the node `context`.

    Raises:
        ConfigError: The model's tokenizer or chat template can't write them.
    """
    with config_errors("context, or the model's tokenizer"):
        return ContextManager(bundle, **plain(context))


def build_proxy(
    rollout: DictConfig,
    *,
    environments: EnvironmentManager,
    context: ContextT,
    hint: Hint | None = None,
    **changes: Any,
) -> AgentProxy[ContextT]:
    """Build the proxy that plays by the node `rollout`, with `changes` to its settings."""
    settings = replace(episode_settings(rollout), **changes)
    failures = read_settings(FailureSettings, rollout.get("failures") or OmegaConf.create())
    return AgentProxy(
        environments=environments,
        context=context,
        hint=hint,
        failures=failures,
        **vars(settings),
    )


def episode_settings(rollout: DictConfig) -> EpisodeSettings:
    """Return the settings of episodes in the node `rollout`, in training and in evaluation."""
    return read_settings(EpisodeSettings, rollout)


def build_endpoint(cfg: DictConfig) -> ChatEndpoint | None:
    """Return the config's model behind an API, or None.

    Raises:
        ConfigError: Its package is not installed, or its key is not set.
    """
    with config_errors("endpoint"):
        endpoint: ChatEndpoint | None = instantiate(cfg.endpoint, _convert_="all")
    return endpoint


def build_engine(engine: DictConfig, bundle: ModelBundle) -> RolloutEngine:
    """Build the rollout engine of the node `rollout.engine` for a model that does not train.

    Raises:
        ConfigError: It can't sample for the model.
    """
    with config_errors("rollout.engine"):
        return engine_factory(engine)(PolicyModule(bundle))


def build_environments(env: DictConfig, **changes: Any) -> EnvironmentManager:
    """Build the manager of the environment of the node `env`, with `changes` to its settings."""
    return EnvironmentManager(**(manager_settings(env) | changes))


def build_critic(
    cfg: DictConfig,
    bundle: ModelBundle,
    *,
    build: Callable[[DictConfig], ModelBundle] = build_bundle,
) -> CriticModule | None:
    """Build the algorithm's critic: on the policy's backbone (`shared`), on its `own`, or `none`.

    Args:
        cfg: Config of the run.
        bundle: The policy's model.
        build: Builds or loads the model of an own backbone.
    """
    kind = cfg.algorithm.critic
    if kind == "none":
        return None
    backbone = build_critic_model(cfg, bundle, build=build) if kind == "own" else None
    if backbone is not None:
        backbone.shares_prefix = cfg["update"].share_prefix
        backbone.packs_rows = cfg["update"].packed
    with seeded(cfg.seed, "critic"):
        return CriticModule(
            (backbone or bundle).hidden_size,
            backbone=backbone,
            detach=read_settings(CriticSettings, cfg.critic).detach,
            gradient_checkpointing=cfg["update"].gradient_checkpointing,
        )


def build_critic_model(
    cfg: DictConfig, policy: ModelBundle, *, build: Callable[[DictConfig], ModelBundle]
) -> ModelBundle:
    """Build the model of a critic with its own: `critic.build`, or the policy's again.

    Args:
        cfg: Config of the run.
        policy: The policy's model.
        build: Builds or loads the model of a config.

    Raises:
        ConfigError: It reads other inputs than the policy.
    """
    if cfg.critic.build is None:
        return build(cfg)
    own = OmegaConf.merge(_shared_with_critic(cfg), cfg.critic.build)
    bundle = build(OmegaConf.create({"env": plain(cfg.env), "model": {"build": own}}))
    if (difference := policy.input_difference(bundle)) is not None:
        raise ConfigError(
            f"critic.build: {difference}, and the critic reads what the policy has read; give a model of the same "
            "family, or null"
        )
    return bundle


def _shared_with_critic(cfg: DictConfig) -> dict[str, Any]:
    """Return the settings that a critic's own model takes over from the policy's if both are loaded in the same way."""
    policy, critic = cfg.model.build, cfg.critic.build
    same = policy._target_ == critic.get("_target_")
    shared = ("max_tokens", "shows_images", "prompt_format", "words")
    return {key: policy[key] for key in shared if same and key in policy}


def build_agent(components: RunComponents) -> AgentModule:
    """Build the run's agent."""
    cfg = components.cfg
    engine = checked_engine_factory(
        cfg.rollout.engine, components.proxy, context=plain(cfg.context)
    )
    return assemble_agent(cfg, components.policy, components.critic, engine=engine)


def assemble_agent(
    cfg: DictConfig,
    policy: PolicyModule,
    critic: CriticModule | None,
    *,
    engine: EngineFactory | None = None,
) -> AgentModule:
    """Build the agent. A reference policy is a copy of the policy's present weights.

    Args:
        cfg: Config of the run.
        policy: Policy.
        critic: Critic, if the algorithm needs one.
        engine: Builds the rollout engine; the config's by default.
    """
    algorithm = cfg.algorithm
    update = read_settings(UpdateSettings, cfg["update"])
    if update.freeze_vision:
        policy.freeze_vision()
    return AgentModule(
        policy,
        critic,
        estimator=instantiate(algorithm.estimator, _convert_="all"),
        masks=instantiate(algorithm.masks, _convert_="all"),
        loss=instantiate(algorithm.loss, _convert_="all"),
        optimizer=instantiate(cfg.optimizer, _convert_="all"),
        engine=engine or engine_factory(cfg.rollout.engine),
        normalizer=instantiate(algorithm.get("normalize"), _convert_="all"),
        optimization=read_settings(OptimizationSettings, cfg),
        critic_learning_rate=read_settings(CriticSettings, cfg.critic).lr,
        update=update,
        truncation=truncation_of(episode_settings(cfg.rollout)),
        environments={name: own.share for name, own in environment_nodes(cfg.env).items()}
        if is_mixture(cfg.env)
        else None,
    )


def build_datamodule(components: RunComponents) -> RolloutDataModule:
    """Build the DataModule of the RL phase."""
    cfg = components.cfg
    return RolloutDataModule(
        components.proxy,
        validation_sets=components.validation_sets,
        iteration=read_settings(IterationSettings, cfg.rollout),
        update=read_settings(UpdateSettings, cfg["update"]),
        seed=cfg.seed,
        held_out=cfg.validation.held_out,
        curriculum=instantiate(cfg.curriculum, _convert_="all"),
        rewards=build_named(cfg.algorithm.get("rewards")),
        group_filter=instantiate(cfg.algorithm.get("filter"), _convert_="all"),
        observations=cfg.algorithm.masks.get("observations", False),
        text=_predicts_text(cfg),
        mixture=_mixture(cfg),
        opponents=_opponents(cfg, components.policy),
    )


def check_opponents(components: RunComponents) -> None:
    """Check that the files of opponents hold weights of the run's model, as before a warm start that may take long.

    Raises:
        ConfigError: A file holds another model's weights.
    """
    _opponents(components.cfg, components.policy)


def _opponents(cfg: DictConfig, policy: PolicyModule) -> Opponents | None:
    """Return the opponents of a run's games, those of files with their weights.

    Raises:
        ConfigError: A file holds another model's weights.
    """
    opponents: Opponents | None = instantiate(cfg.get("opponents"), _convert_="all")
    for file in [] if opponents is None else opponents.files:
        # it builds models with this module
        from ragen_pl.assembly.weights import trained_weights

        assert opponents is not None
        opponents.add_file(
            trained_weights(policy, Path(file).expanduser(), source=f"opponents.files={file}")
        )
    return opponents


def _mixture(cfg: DictConfig) -> Mixture | None:
    """Return the environments of a run with several; None of one."""
    if not is_mixture(cfg.env):
        return None

    from ragen_pl.data.mixture import MixedEnvironment, Mixture
    from ragen_pl.data.task_sampling import SamplingRule

    return Mixture(
        {
            name: MixedEnvironment(
                share=cfg.env.environments[name].share,
                curriculum=instantiate(alone.curriculum, _convert_="all"),
                rewards=build_named(alone.algorithm.get("rewards")),
            )
            for name, alone in environment_configs(cfg).items()
        },
        sampling=None
        if cfg.env.get("sampling") is None
        else read_settings(SamplingRule, cfg.env.sampling),
    )


def build_named(targets: DictConfig | None) -> list[Any]:
    """Build a dictionary of named targets, such as reward functions or callbacks; null ones are left out."""
    return [instantiate(target, _convert_="all") for target in (targets or {}).values() if target]


def build_warm_start(components: RunComponents) -> tuple[WarmStartModule, WarmStartDataModule]:
    """Build the warm start's module and its demonstrations or records."""
    cfg = components.cfg
    module = assemble_warm_start(cfg, components.policy, components.critic)
    settings = read_settings(WarmStartSettings, cfg.warm_start)
    update = read_settings(UpdateSettings, cfg["update"])
    validation_set = components.validation_sets[0]
    if cfg.warm_start.get("records") is not None:
        from ragen_pl.data.records import RecordDataModule

        environments = environments_of_records(cfg.env)
        return module, RecordDataModule(
            replace(components.proxy, environments=environments),
            records=read_settings(RecordSettings, cfg.warm_start.records),
            validation_set=validation_set if cfg.validation.held_out else None,
            states=cfg.validation.episodes,
            learns_values=learns_values(cfg),
            settings=settings,
            update=update,
            seed=cfg.seed,
        )
    if not is_mixture(cfg.env):
        return module, _demonstrations(components.proxy, cfg, validation_set, seed=cfg.seed)

    from ragen_pl.data.mixture import MixedDemonstrationDataModule

    sets = {one.name: one for one in components.validation_sets}
    parts = {
        name: _demonstrations(components.proxy, alone, sets[name], seed=derive_seed(cfg.seed, name))
        for name, alone in environment_configs(cfg).items()
        if cfg.env.environments[name].share > 0
    }
    return module, MixedDemonstrationDataModule(
        components.proxy, parts=parts, settings=settings, update=update, seed=cfg.seed
    )


def _demonstrations(
    proxy: AgentProxy[ContextManager],
    cfg: DictConfig,
    validation_set: ValidationSet,
    *,
    seed: int,
) -> DemonstrationDataModule:
    """Build the demonstrations in the environment of a config with one."""
    left_out = held_out_states(validation_set) if cfg.validation.held_out else ()
    environments = build_environments(
        cfg.env,
        held_out=frozenset(left_out),
        max_response_tokens=cfg.rollout.max_response_tokens,
    )
    return DemonstrationDataModule(
        replace(proxy, environments=environments, hint=None),
        policy=instantiate(cfg.warm_start.demonstrator),
        settings=read_settings(WarmStartSettings, cfg.warm_start),
        update=read_settings(UpdateSettings, cfg["update"]),
        seed=seed,
    )


def environments_of_records(env: DictConfig) -> EnvironmentManager:
    """Build the manager by whose resets records are known: it holds out nothing."""
    return build_environments(env, held_out=frozenset(), held_out_fraction=None)


def learns_values(cfg: DictConfig) -> bool:
    """Return whether a critic learns in the warm start."""
    return cfg.algorithm.critic != "none" and cfg.warm_start.value_coefficient > 0


def assemble_warm_start(
    cfg: DictConfig, policy: PolicyModule, critic: CriticModule | None
) -> WarmStartModule:
    """Build the warm start's module."""
    return WarmStartModule(
        policy,
        critic,
        optimizer=instantiate(cfg.warm_start.optimizer, _convert_="all"),
        settings=read_settings(WarmStartSettings, cfg.warm_start),
        master_weights=cfg.master_weights,
        max_skipped_steps=cfg["update"].max_skipped_steps,
    )


def held_out_states(validation_set: ValidationSet) -> list[str]:
    """Return the initial states of a validation set that demonstrations leave out; none that a fraction holds out."""
    by_fraction = validation_set.proxy.environments.held_out_fraction is not None
    return [] if by_fraction else validation_set.state_keys()


def build_loggers(cfg: DictConfig, run: Run) -> list[Logger]:
    """Build the config's logger, if it has one, and one that writes the run's record if that one does not."""
    settings = {"run_dir": str(run.folder), "settings": plain(cfg)}
    loggers = (
        [instantiate(cfg.logger, **settings, _recursive_=False, _convert_="all")]
        if cfg.logger
        else []
    )
    if not instances(loggers, KeepsRecord):
        loggers.append(RecordLogger(run_dir=str(run.folder)))
    return loggers


def choose_accelerator(name: str) -> str:
    """Return Lightning's accelerator: for `auto` a CUDA GPU if torch finds one, else the CPU.

    Other accelerators, such as Apple's MPS, are never chosen.
    """
    return device_named(name).type if name == "auto" else name


def device_named(name: str) -> torch.device:
    """Return a device by its name; `auto` is the GPU if there is one.

    Raises:
        ConfigError: torch finds no CUDA device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: torch finds no CUDA device; set device=cpu")
    return torch.device(name)


def check_optimizer(settings: DictConfig, *, key: str) -> None:
    """Build an optimizer of a single number. Wrong settings are then refused before training.

    Raises:
        ConfigError: The optimizer does not accept its settings.
    """
    with config_errors(key):
        instantiate(settings, _convert_="all")([torch.nn.Parameter(torch.zeros(1))])
