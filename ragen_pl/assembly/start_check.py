"""The check of a model at the start of a run: engine, trainer and the model's own forward agree.

It runs after the Trainer has placed the model: on the device of the run, in its precision and with its attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig

from ragen_pl.base.distributed import all_ranks_do, rank
from ragen_pl.config.errors import ConfigError, config_errors
from ragen_pl.engines.protocol import EngineFactory, EnginePolicy, EngineTraits, RolloutEngine
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.models.facts import family_failure
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.modules.sharding import is_sharded, load_engine
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy

ForwardContext = Callable[[], AbstractContextManager[object]]


def engine_factory(engine: DictConfig) -> EngineFactory:
    """Return the rollout engine of the node `rollout.engine`, which is built from a policy."""
    factory: EngineFactory = instantiate(engine, _convert_="all")
    return factory


def checked_engine_factory(
    engine: DictConfig, proxy: AgentProxy[ContextManager], *, context: Mapping[str, Any]
) -> EngineFactory:
    """Return the rollout engine of a node, which is compared with the trainer when it is first built.

    A model that was built from its config is not compared with an engine in place that calls the trainer's functions.

    Args:
        engine: Node `rollout.engine` of the config.
        proxy: Plays the run's episodes.
        context: Settings of the run's `ContextManager`.
    """
    factory, traits = engine_factory(engine), engine_class(engine)
    same = traits is not None and traits.in_place and traits.shares_forward
    checked = False

    def build(
        policy: EnginePolicy, *, forward_context: ForwardContext = nullcontext
    ) -> RolloutEngine:
        nonlocal checked
        with config_errors("rollout.engine"):
            built = all_ranks_do(lambda: factory(policy, forward_context=forward_context))
        if checked or (same and policy.bundle.source is None):
            return built

        from ragen_pl.rollout.agreement import check_engine

        def compare(**settings: Any) -> None:
            check_engine(
                ContextManager(policy.bundle, **context),
                built,
                image_size=image_size(proxy.environments),
                policy=policy,
                truncation=proxy.truncation,
                forward_context=forward_context,
                **settings,
            )

        try:
            with _refusals(policy):
                load_engine(built, policy, version=0)
                _on_first_rank(compare) if built.in_place else compare()
        except BaseException:
            built.close()
            raise
        checked = True
        return built

    return build


def engine_class(engine: DictConfig) -> type[EngineTraits] | None:
    """Return the class of the node `rollout.engine`; None where it is not known before the engine is built."""
    target = get_object(engine._target_)
    return target if isinstance(target, type) and issubclass(target, EngineTraits) else None


class TrainerCheck(pl.Callback):
    """Compare the trainer with the model's own forward before a warm start.

    Args:
        policy: Policy.
        environments: Environments of the run.
        context: Settings of the run's `ContextManager`.
    """

    def __init__(
        self,
        policy: PolicyModule,
        environments: EnvironmentManager,
        *,
        context: Mapping[str, Any],
    ) -> None:
        self.policy, self.environments, self.context = policy, environments, context

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare them, unless the model was built from its config."""
        if self.policy.bundle.source is None:
            return

        from ragen_pl.rollout.agreement import check_trainer

        def compare(**settings: Any) -> None:
            check_trainer(
                ContextManager(self.policy.bundle, **self.context),
                image_size=image_size(self.environments),
                policy=self.policy,
                forward_context=trainer.precision_plugin.forward_context,
                **settings,
            )

        with _refusals(self.policy):
            compare() if is_sharded(self.policy) else _on_first_rank(compare)


def check_images(policy: EnginePolicy, environments: EnvironmentManager) -> None:
    """Encode an image of the environment on the first rank, before demonstrations show any.

    Raises:
        ConfigError: The family can't be run with images.
    """
    bundle, size = policy.bundle, image_size(environments)
    if bundle.source is None or size is None:
        return
    shown = np.zeros((*size, 3), dtype=np.uint8)
    with _refusals(policy), torch.no_grad():
        encoder = bundle.images
        if encoder is not None:
            all_ranks_do(lambda: encoder.encode_together([shown]) if rank() == 0 else None)


def _on_first_rank(compare: Callable[..., None]) -> None:
    """Compare on the first rank only, and raise its error on all ranks."""
    all_ranks_do(lambda: compare(alone=True) if rank() == 0 else None)


@contextmanager
def _refusals(policy: EnginePolicy) -> Iterator[None]:
    """Raise in one line whatever a family that is not supported leads to."""
    place = f"model.build: this family ({policy.bundle.facts.family}) can't be run"
    with config_errors(place):
        try:
            yield
        except Exception as error:
            if (reason := family_failure(error)) is None:
                raise
            raise ConfigError(f"{place}: {reason}; choose another model") from error


def image_size(environments: EnvironmentManager) -> tuple[int, int] | None:
    """Return height and width of the (first) environment's images; None for an environment of text."""
    # in a mixture all show images, or none does
    manager = next(iter(environments.managers_by_name.values()))
    (slot,) = manager.open([EpisodeSpec(group=0, member=0, seed=0)])
    manager.close([slot])
    images = slot.observation.images if slot.observation is not None else []
    return images[0].shape[:2] if images else None
