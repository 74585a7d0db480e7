"""What is checked just before training, and what is said when somebody stops it; needs torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import lightning.pytorch as pl
import torch
from hydra.utils import instantiate
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig
from torch import Tensor

from ragen_pl.callbacks.summary import own_overrides, resume_command
from ragen_pl.config.errors import ConfigError, config_errors
from ragen_pl.run.folder import Run

if TYPE_CHECKING:
    from ragen_pl.run.build import RunComponents

AS_IT_WAS = "give the overrides that the run had (its config.yaml holds them all)"
_STOPPED = {"SIGTERM": 143, "Ctrl-C": 130}  # 128 and the signal's number, as of a shell


def check_optimizer(settings: DictConfig, *, key: str) -> None:
    """Build an optimizer of a single number, so that its settings are refused before training."""
    with config_errors(key):
        instantiate(settings, _convert_="all")([torch.nn.Parameter(torch.zeros(1))])


def check_checkpoint(file: Path | None, module: pl.LightningModule) -> None:
    """Check that a checkpoint can be read and is of this module's shapes.

    Raises:
        ConfigError: naming the first tensor that differs.
    """
    if file is None:
        return
    said = f"ckpt_path={file}"
    with config_errors(said, hint="give another checkpoint"):
        state = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
    missing = {"state_dict", "optimizer_states", "loops", "agent"} - set(state)
    if missing:
        raise ConfigError(
            f"{said}: holds no {sorted(missing)[0]}, so that training cannot go on from it; "
            "give a checkpoint of ragen_pl.fit that is not of weights only"
        )
    check_shapes(state["state_dict"], module, said=said, hint=AS_IT_WAS)


def load_initial_weights(parts: RunComponents, file: Path, *, said: str, hint: str) -> None:
    """Load policy and critic, where there is one, from a `warm_start.pt` or a run's checkpoint.

    Args:
        parts: whose weights are replaced. A critic in the file that no part needs is left.
        file: what is loaded.
        said: what the user said that it follows from.
        mend: what to do about a file of another kind.

    Raises:
        ConfigError: the file can't be read, or holds another model, or no critic where one is needed.
    """
    with config_errors(said, hint=hint):
        saved = torch.load(file, map_location="cpu", weights_only=True)
        state: dict[str, Tensor] = saved.get("module", saved.get("state_dict", {}))
    for prefix, module in (("policy.", parts.policy), ("critic.", parts.critic)):
        if module is None:
            continue
        weights = {
            name.removeprefix(prefix): value
            for name, value in state.items()
            if name.startswith(prefix)
        }
        check_shapes(weights, module, said=said, hint=hint, prefix=prefix)
        module.load_state_dict(weights)


def check_shapes(
    theirs: Mapping[str, Tensor],
    module: torch.nn.Module,
    *,
    said: str,
    hint: str,
    prefix: str = "",
) -> None:
    """Check that weights are of this module's names and shapes.

    Raises:
        ConfigError: naming the first tensor that differs, `prefix` before its name.
    """
    found = {name: list(tensor.shape) for name, tensor in theirs.items()}
    expected = {name: list(tensor.shape) for name, tensor in module.state_dict().items()}
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise ConfigError(
                f"{said}: holds another model or algorithm: {prefix}{name} is {found.get(name, 'not there')}, "
                f"expected {expected.get(name, 'none')}; {hint}"
            )


def warn_about_template(parts: RunComponents) -> None:
    """Say where a model's chat template rewrites earlier responses, and what that costs."""
    if parts.cfg.context.window != 1 and not parts.proxy.context.template.keeps_prefix:
        sys.stderr.write(
            "ragen_pl: the model's chat template rewrites earlier responses, so that every turn is rendered and trained "
            "as a sample of its own: right, and slower; context.window=1 costs nothing\n"
        )


def stopped(error: SystemExit, run: Run) -> object:
    """Say in one line what a stopped run has saved and how it goes on; return the exit code."""
    by_hand = isinstance(error.__context__, KeyboardInterrupt)
    if not by_hand and not isinstance(error, SIGTERMException):
        return error.code
    if getattr(rank_zero_only, "rank", 0):
        return 0  # the first rank tells; another's exit code would have it killed before it can
    signal = "Ctrl-C" if by_hand else "SIGTERM"
    arguments = own_overrides()
    if run.last.exists():
        saved, checkpoint = f"its last checkpoint is {run.last}", str(run.last)
    else:
        saved = "the warm start was saved" if run.warm_start.exists() else "nothing was saved"
        saved, checkpoint = f"{saved}, no checkpoint yet", "last"
        if not any(argument.startswith("paths.run_dir=") for argument in arguments):
            arguments.append(f"paths.run_dir={run.folder}")
    command = resume_command(arguments, checkpoint=checkpoint)
    sys.stderr.write(f"ragen_pl: stopped by {signal}; {saved}; go on with: {command}\n")
    return _STOPPED[signal]
