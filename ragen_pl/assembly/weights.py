"""Load the weights of a checkpoint, and check first that they fit the module."""

from __future__ import annotations

import pickle
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from omegaconf import DictConfig
from torch import Tensor

from ragen_pl.assembly.build import build_bundle
from ragen_pl.base.error_text import error_chain
from ragen_pl.base.instances import instances
from ragen_pl.base.settings_files import SETTINGS, settings_of_weights
from ragen_pl.base.tensor_files import NoLargerThan, TooLargeError, load_plain
from ragen_pl.checkpoints.checkpoint_check import changed_entry
from ragen_pl.checkpoints.sharded_checkpoint import non_finite_entry, read_shards
from ragen_pl.config.errors import ConfigError, config_errors
from ragen_pl.config.nodes import leaves
from ragen_pl.config.own_files import is_own
from ragen_pl.engines.generation_check import GenerationCheck
from ragen_pl.modules.critic import CriticModule
from ragen_pl.modules.frozen import (
    FINGERPRINTS,
    Fingerprint,
    fingerprint,
    fingerprints,
    frozen_problem,
    with_frozen,
)
from ragen_pl.modules.optimized import OptimizedModule, resume_problem
from ragen_pl.modules.policy import PolicyModule

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle

SAME_OVERRIDES = "give the overrides that the run had (its config.yaml holds them all)"
_MODEL = "policy.model."
# what training continues from, besides the state that Lightning always writes
_NEEDED = {"state_dict", "optimizer_states", "loops"}


class UnknownObjectError(ConfigError):
    """Checkpoint with an object that is neither a tensor nor plain data."""


def load_bundle(cfg: DictConfig) -> ModelBundle:
    """Return model, tokenizer and processor with the weights of `cfg.source`, in eval mode.

    Args:
        cfg: Settings as prepared by `ragen_pl.evaluation.settings`.

    Raises:
        ConfigError: The weights cannot be read, or belong to another model.
    """
    source = cfg.source.checkpoint
    if source is not None and Path(source).is_file():
        file, run = Path(source), cfg.source.run
        saved = read_policy(file)
        written = None if run is None else settings_of_weights(Path(run), saved.get(SETTINGS))
        settings = None if cfg.trust else written
        bundle = build_for(module_state(saved), cfg, settings=settings)
        _load_policy(bundle, saved, file)
    else:
        bundle = build_bundle(cfg)
    if source is not None and Path(source).is_dir():
        weights = dict(bundle.model.named_parameters())
        hint = "give another folder, or export the model again"
        _check_finite({"state_dict": weights}, weights.keys(), source=str(source), hint=hint)
        # the first responses would end with other errors
        with config_errors(f"{source}: its tokenizer or generation_config.json", hint=hint):
            GenerationCheck.of(bundle)
            bundle.tokenizer("a")
    bundle.model.eval()
    return bundle


def build_for(
    weights: Mapping[str, Tensor],
    cfg: DictConfig,
    *,
    settings: Path | None,
    key: str = "model.build",
) -> ModelBundle:
    """Build or load a model, one of somebody else's settings only if it is about as large as its weights.

    A model that is loaded, and not made from its settings, has the size of its own files.

    Args:
        weights: Weights of a checkpoint, all of the model among them.
        cfg: Settings with those of the model.
        settings: File that they come from; None for settings that are trusted.
        key: Key of the model's, for error messages.

    Raises:
        ConfigError: It would be far larger. No memory has been taken for it.
    """
    build = cfg.model.build
    if settings is None or is_own(settings) or build.get("path") is not None:
        return build_bundle(cfg)
    try:
        with NoLargerThan(weights):
            return build_bundle(cfg)
    except Exception as error:
        # Hydra raises an error of its own on top
        cause = next(iter(instances(error_chain(error), TooLargeError)), None)
        if cause is None:
            raise
        numbers = {
            f"{key}.{name}={value}": value
            for name, value in leaves(build)
            if isinstance(value, int | float) and name != "seed"
        }
        largest = max(numbers, key=numbers.__getitem__, default=key)
        raise ConfigError(
            f"{settings}: {largest}, its largest number: {cause}; give the settings that the weights were trained "
            "with, or set trust=true if you trust its author"
        ) from error


def load_weights(bundle: ModelBundle, file: Path) -> None:
    """Load the policy's weights from a Lightning checkpoint or a run's `warm_start.pt`.

    Raises:
        ConfigError: The file is no such checkpoint, or holds another model's weights.
    """
    _load_policy(bundle, read_policy(file), file)


def _load_policy(bundle: ModelBundle, saved: Mapping[str, Any], file: Path) -> None:
    hint = "leave model settings to the checkpoint's run, or give those that it was trained with"
    weights = with_prefix(module_state(saved), _MODEL)
    complete = _complete(bundle.model, weights, saved, name="policy", source=str(file), hint=hint)
    bundle.model.load_state_dict(complete)


def read_policy(file: Path) -> dict[str, Any]:
    """Return a checkpoint that holds a policy.

    Raises:
        ConfigError: The file cannot be read, or holds no policy.
    """
    hint = "give a checkpoint that a run has written"
    saved = read_checkpoint(file, source=str(file), hint=hint)
    if not with_prefix(module_state(saved), _MODEL):
        raise ConfigError(f"{file} holds no policy of ragen_pl; {hint}")
    return saved


def _complete(
    module: torch.nn.Module,
    weights: Mapping[str, Tensor],
    saved: Mapping[str, Any],
    *,
    name: str,
    source: str,
    hint: str,
    prefix: str = "",
) -> dict[str, Tensor]:
    """Return a checkpoint's weights, checked, with the module's frozen ones.

    Args:
        module: Module of the weights.
        weights: Entries of the checkpoint under the module's own names.
        saved: The checkpoint.
        name: The module's name in the checkpoint.
        source: The setting or file that they come from, for error messages.
        hint: Remedy, for error messages.
        prefix: Put before a tensor's name in error messages.
    """
    complete = with_frozen(module, weights)
    check_shapes(complete, module, source=source, hint=hint, prefix=prefix)
    parameters = {key for key, _ in module.named_parameters(remove_duplicate=False)}
    _check_finite({"state_dict": weights}, parameters, source=source, hint=hint, prefix=prefix)
    fingerprints = {key: value for key, value in saved.get(FINGERPRINTS, {}).items() if key == name}
    if fingerprints:
        check_frozen(fingerprints, {name: fingerprint(module)}, source=source)
    return complete


def trained_weights(policy: PolicyModule, file: Path, *, source: str) -> dict[str, Tensor]:
    """Return the weights of a checkpoint that a policy trains, by name.

    Args:
        policy: Policy of the same model.
        file: A `warm_start.pt` or a run's checkpoint.
        source: The setting that named the file, for error messages.

    Raises:
        ConfigError: The file cannot be read, or holds another model's weights, also among those not trained.
    """
    hint = "give a checkpoint of a run with the same model"
    saved = read_checkpoint(file, source=source, hint=hint)
    weights = with_prefix(module_state(saved), "policy.")
    complete = _complete(policy, weights, saved, name="policy", source=source, hint=hint)
    trained: dict[str, Tensor] = {}
    for name, weight in policy.named_parameters():
        value = complete[name]
        if weight.requires_grad:
            trained[name] = value.to("cpu", copy=True)
        elif not torch.equal(value.to(weight.device, weight.dtype), weight):
            raise ConfigError(
                f"{source}: holds another {name}, which this run does not train; {hint}, or set "
                "update.freeze_vision=false"
            )
    return trained


def check_frozen(
    saved: Mapping[str, Fingerprint], present: Mapping[str, Fingerprint], *, source: str
) -> None:
    """Check that frozen weights are those of a checkpoint.

    Args:
        saved: The checkpoint's fingerprints.
        present: Those of the modules that it is loaded into.
        source: The setting or file that the checkpoint comes from.

    Raises:
        ConfigError: They have changed.
    """
    problem = frozen_problem(saved, present)
    if problem is not None:
        raise ConfigError(f"{source}: {problem}")


class HasModels(Protocol):
    """Policy and critic, such as those of `RunComponents`."""

    policy: PolicyModule
    critic: CriticModule | None


def load_initial_weights(
    components: HasModels, file: Path, *, source: str, hint: str = SAME_OVERRIDES
) -> None:
    """Load policy and critic from a `warm_start.pt` or a run's checkpoint.

    A run without a critic ignores the critic of the file.

    Args:
        components: Receive the weights.
        file: The file to read.
        source: The setting that named the file, for error messages.
        hint: Remedy for a file of another kind, for error messages.

    Raises:
        ConfigError: The file cannot be read, holds another model, or lacks a critic.
    """
    saved = read_checkpoint(file, source=source, hint=hint)
    for name, module in (("policy", components.policy), ("critic", components.critic)):
        if module is not None:
            prefix = f"{name}."
            weights = with_prefix(module_state(saved), prefix)
            complete = _complete(
                module, weights, saved, name=name, source=source, hint=hint, prefix=prefix
            )
            module.load_state_dict(complete)


def check_resumable(
    file: Path, module: OptimizedModule, *, needed: str | None = None, trusted: bool = False
) -> None:
    """Check that training can continue from a checkpoint.

    Args:
        file: The checkpoint.
        module: The module to be trained.
        needed: State that the module's own checkpoints hold besides Lightning's.
        trusted: See `read_checkpoint`.

    Raises:
        ConfigError: It cannot be read, lacks state, or is of another model or optimizer.
    """
    source = f"ckpt_path={file}"
    hint = "give another checkpoint"
    try:
        saved = read_checkpoint(file, source=source, hint=hint, trusted=trusted, data=False)
    except UnknownObjectError as error:
        # a user's callbacks may store any object
        raise ConfigError(f"{error}, or set trust=true if you trust its author") from error
    missing = (_NEEDED | ({needed} if needed else set())) - set(saved)
    if missing:
        raise ConfigError(
            f"{source}: holds no {sorted(missing)[0]}, so training cannot continue from it; "
            "give a checkpoint of ragen_pl.fit that is not of weights only"
        )
    complete = with_frozen(module, saved["state_dict"])
    check_shapes(complete, module, source=source, hint=SAME_OVERRIDES)
    parameters = {key for key, _ in module.named_parameters(remove_duplicate=False)}
    _check_finite(saved, parameters, source=source, hint=hint)
    check_frozen(saved.get(FINGERPRINTS, {}), fingerprints(module), source=source)
    problem = resume_problem(saved, module)
    if problem is not None:
        raise ConfigError(
            f"{source}: {problem}, so it can't continue; {SAME_OVERRIDES}, or start another run with its weights: "
            f"warm_start.weights={file}"
        )


def read_checkpoint(
    file: Path, *, source: str, hint: str, trusted: bool = False, data: bool = True
) -> dict[str, Any]:
    """Read a file of `torch.save` to the CPU. Its tensors stay in the file until they are used.

    Args:
        file: The file to read.
        source: The setting that named the file, for error messages.
        hint: Remedy, for error messages.
        trusted: Also load objects that are not tensors or plain data, which may run any code.
        data: Read the weights of a sharded checkpoint; otherwise they are on the meta device.

    Raises:
        UnknownObjectError: It holds something else than tensors and plain data, and is not trusted.
        ConfigError: It cannot be read, or holds no dictionary.
    """
    with config_errors(source, hint=hint):
        try:
            saved = (
                torch.load(file, mmap=True, map_location="cpu", weights_only=False)
                if trusted
                else load_plain(file)
            )
        except pickle.UnpicklingError as error:
            raise _described(error, source, hint) from error
        if not isinstance(saved, dict):
            raise TypeError(f"expected a checkpoint's dictionary, found {type(saved).__name__}")
        if (problem := changed_entry(file)) is not None:
            raise ConfigError(f"{source}: {problem}; {hint}")
        saved = read_shards(saved, file, optimizers=False, data=data)
    return saved


def _check_finite(
    saved: Mapping[str, Any],
    parameters: Collection[str],
    *,
    source: str,
    hint: str,
    prefix: str = "",
) -> None:
    """Check the weights of a checkpoint, and the states of its optimizers.

    Args:
        saved: The checkpoint.
        parameters: Names of the module's weights that are no buffers.
        source: The setting or file that they come from, for error messages.
        hint: Remedy, for error messages.
        prefix: Put before a weight's name in error messages.

    Raises:
        ConfigError: Naming the first entry that is not finite.
    """
    entry = non_finite_entry(saved, parameters)
    if entry is not None:
        name = entry.replace("state_dict.", f"state_dict.{prefix}", 1)
        raise ConfigError(f"{source}: its entry {name} has NaN or infinite values; {hint}")


def _described(error: pickle.UnpicklingError, source: str, hint: str) -> Exception:
    """Return an error that names the object which can't be read without running its code."""
    found = re.search(r"(?:GLOBAL |[Gg]lobal:? |class |function )([\w.]+\.\w+)", str(error))
    if found is None:
        return error
    return UnknownObjectError(
        f"{source}: holds {found[1]}, which is neither a tensor nor plain data, and to read it may run any code; {hint}"
    )


def module_state(saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the module's weights in a checkpoint: of Lightning's layout, or of a `warm_start.pt`."""
    state: dict[str, Tensor] = saved.get("state_dict", saved.get("module", {}))
    return state


def with_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the entries whose name starts with `prefix`, without it.

    >>> with_prefix({"policy.a": 1, "critic.a": 2}, "policy.")
    {'a': 1}
    """
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


def check_shapes(
    weights: Mapping[str, Tensor],
    module: torch.nn.Module,
    *,
    source: str,
    hint: str,
    prefix: str = "",
) -> None:
    """Check that weights have the names and shapes of a module's.

    Args:
        weights: To be loaded into the module.
        module: Defines the expected names and shapes.
        source: The setting or file that they come from, for error messages.
        hint: Remedy, for error messages.
        prefix: Put before a tensor's name in error messages.

    Raises:
        ConfigError: Naming the first tensor that differs.
    """
    given = {name: list(tensor.shape) for name, tensor in weights.items()}
    expected = {name: list(tensor.shape) for name, tensor in module.state_dict().items()}
    for name in sorted(given.keys() | expected.keys()):
        if given.get(name) != expected.get(name):
            raise ConfigError(
                f"{source}: holds another model or algorithm: {prefix}{name} is {given.get(name, 'missing')}, "
                f"expected {expected.get(name, 'none')}; {hint}"
            )
