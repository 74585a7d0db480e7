"""The optimizer's settings are those of the config, also in a run that continues from a checkpoint.

States of optimizer and schedule hold the settings of the run that wrote them. A checkpoint therefore holds what the
config asked for: what it asks for now and did not then takes effect at a resume. All else stays as the checkpoint has
it, such as a learning rate that a callback has lowered.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ragen_pl.base.distributed import rank
from ragen_pl.base.former_names import current
from ragen_pl.base.settings_files import SETTINGS, newest_settings
from ragen_pl.data.batch import Minibatch
from ragen_pl.modules.critic import CriticModule
from ragen_pl.modules.frozen import SavesTrainedWeights
from ragen_pl.modules.optimizers import (
    HIDDEN,
    KERNELS,
    OptimizerFactory,
    ParameterGroup,
    build_optimizer,
    class_of,
    module_name,
    parameter_groups,
    stepping_optimizer,
    trained_groups,
)
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.modules.settings import OptimizationSettings

log = logging.getLogger(__name__)

UPDATE = "update"
"""Phase of the updates of an agent."""

RECORD = "optimization"
"""Entry of a checkpoint: the optimizer that the config asked for."""

Record = dict[str, Any]
# of a parameter group: no settings that a checkpoint keeps
_OTHER = ("params", "name", HIDDEN, "initial_lr", *KERNELS)


class OptimizedModule(SavesTrainedWeights):
    """A training module with one optimizer and a `LambdaLR`, whose settings follow the config at a resume.

    Its steps can be recorded and repeated (`ragen_pl.modules.recording`).

    Attributes:
        phase: Name of what is trained.
        policy: Policy, the group `policy`.
        critic: Critic, the group `critic`; None for none.
        optimizer_factory: Builds the optimizer.
        optimization: Options of the optimizer.
        critic_learning_rate: Learning rate of the critic; None for the policy's.
        optimizer_key: The optimizer's node in the config.
    """

    policy: PolicyModule
    critic: CriticModule | None
    optimizer_factory: OptimizerFactory
    optimization: OptimizationSettings
    critic_learning_rate: float | None
    optimizer_key: ClassVar[str] = "optimizer"
    phase: ClassVar[str] = UPDATE

    def __init__(self) -> None:
        super().__init__()
        self._saved_record: Record | None = None
        self._resumed = False

    def losses(self, batch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a minibatch, as `training_step` does, and its parts by name."""
        raise NotImplementedError

    def present_settings(self) -> str:
        """Return the name of the file with the run's present settings."""
        return newest_settings(Path(self.trainer.default_root_dir)).name

    def build_optimizer(self) -> Optimizer:
        """Return a new optimizer with the groups `policy` and `critic`."""
        optimizer = build_optimizer(
            self.optimizer_factory,
            self._groups(),
            master_weights=self.optimization.master_weights,
            decay_vectors=self.optimization.decay_vectors,
        )
        if any(group.get("fused") for group in optimizer.param_groups) and rank() == 0:
            log.info(
                f"{self.optimizer_key}: fused kernels of {class_of(stepping_optimizer(optimizer))}; "
                f"+{self.optimizer_key}.fused=false takes others"
            )
        return optimizer

    def _groups(self) -> list[ParameterGroup]:
        rate = self.critic_learning_rate
        return parameter_groups(self.policy, self.critic, critic_learning_rate=rate)

    def schedule_settings(self) -> dict[str, float]:
        """Return the settings of the learning rate's schedule by their keys in the config."""
        raise NotImplementedError

    def record(self) -> Record:
        """Return the optimizer of the config: its class, its groups, their names and those of their weights."""
        names = {id(weight): name for name, weight in self.named_parameters()}
        vectors = self.optimization.decay_vectors
        groups = trained_groups(self.optimizer_factory, self._groups(), decay_vectors=vectors)
        probe = self.optimizer_factory([nn.Parameter(torch.zeros(1))])
        return {
            "class": class_of(probe),
            "names": [group.get("name") for group in groups],
            "weights": [[names[id(weight)] for weight in group["params"]] for group in groups],
            "groups": [
                {
                    key: _plain(value)
                    for key, value in {**probe.defaults, **group}.items()
                    if key not in _OTHER
                }
                for group in groups
            ],
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what the config asks of the optimizer, and the name of the file with the run's present settings."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[SETTINGS] = self.present_settings()
        checkpoint[RECORD] = self.record() | {"schedule": self.schedule_settings()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Arrange the optimizer's state in the present groups, which a weight decay may have split."""
        super().on_load_checkpoint(checkpoint)
        saved, self._resumed = checkpoint.get(RECORD), True
        present = self.record()
        if saved is not None and saved["weights"] != present["weights"]:
            saved = _arrange(checkpoint, saved, present["weights"])
        for state in checkpoint.get("optimizer_states", ()):
            # ranks that have written nothing have no state
            for group, name in zip(state.get("param_groups", ()), present["names"], strict=False):
                group.update({} if name is None else {"name": name})
        self._saved_record = saved

    def on_train_start(self) -> None:
        """Let settings take effect that the config has changed since the checkpoint."""
        super().on_train_start()
        if not self._resumed:
            return
        (optimizer,) = self.trainer.optimizers
        (schedule,) = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        assert isinstance(schedule, LambdaLR)
        present = self.record() | {"schedule": self.schedule_settings()}
        factory, saved = self.optimizer_factory, self._saved_record
        changes = change_settings(optimizer, schedule, present, saved, factory=factory)
        self._saved_record, self._resumed = None, False
        if changes and rank() == 0:
            log.info(f"{self.optimizer_key}: changed since the checkpoint: {', '.join(changes)}")


def change_settings(
    optimizer: Optimizer,
    schedule: LambdaLR,
    present: Record,
    saved: Record | None,
    *,
    factory: OptimizerFactory,
) -> list[str]:
    """Change the settings of a loaded optimizer and schedule that the config has changed since the checkpoint.

    Args:
        optimizer: Optimizer with a checkpoint's state.
        schedule: Its schedule.
        present: What the config asks for.
        saved: What it asked for; None for a checkpoint that does not say so, whose learning rates are known alone.
        factory: Builds an optimizer of the config.

    Returns:
        The changes in words.
    """
    if saved is None:
        rates = [{"lr": _plain(group["initial_lr"])} for group in optimizer.param_groups]
        saved = {"groups": rates, "schedule": {}}
    changes: list[str] = []
    new_rates, changed = dict[int, float](), set[int]()
    for number, (group, then, now) in enumerate(
        zip(optimizer.param_groups, saved["groups"], present["groups"], strict=True)
    ):
        for key, before in then.items():
            value = now.get(key, before)
            # a group may lack settings that others have
            if value == before or key not in group:
                continue
            if key == "lr":
                new_rates[number] = value
            else:
                group[key] = value
                changed.add(number)
            text = f"{key} of the {module_name(group)} {_shown(before)} -> {_shown(value)}"
            changes += [] if text in changes else [text]
    for number in changed:
        _complete_states(optimizer, number, factory)
    for key, before in saved["schedule"].items():
        if (value := present["schedule"].get(key, before)) != before:
            changes.append(f"{key} {_shown(before)} -> {_shown(value)}")
    if new_rates or any(
        present["schedule"].get(key, before) != before for key, before in saved["schedule"].items()
    ):
        _follow(optimizer, schedule, new_rates)
    return changes


def _complete_states(optimizer: Optimizer, number: int, factory: OptimizerFactory) -> None:
    """Add what the settings of a group need to the states of its weights, such as AMSGrad's largest second moments.

    Args:
        optimizer: Optimizer with a checkpoint's state, changed in place.
        number: Number of the group.
        factory: Builds an optimizer of the config.
    """
    settings = {k: value for k, value in optimizer.param_groups[number].items() if k != "params"}
    stepping = stepping_optimizer(optimizer)
    for weight in stepping.param_groups[number]["params"]:
        state = stepping.state.get(weight)
        if not state:
            continue
        # a step without a gradient leaves a new state at the values that it begins with
        start = nn.Parameter(torch.zeros_like(weight))
        start.grad = torch.zeros_like(weight)
        probe = factory([settings | {"params": [start]}])
        probe.step()
        for key, value in probe.state[start].items():
            state.setdefault(key, value)


def _follow(optimizer: Optimizer, schedule: LambdaLR, new_rates: Mapping[int, float]) -> None:
    """Set the learning rates that a schedule has now.

    Args:
        optimizer: Its optimizer.
        schedule: Schedule.
        new_rates: The highest learning rate of a group by its number, where it is another one.
    """
    for number, group in enumerate(optimizer.param_groups):
        if number in new_rates:
            schedule.base_lrs[number] = group["initial_lr"] = new_rates[number]
        group["lr"] = schedule.base_lrs[number] * schedule.lr_lambdas[number](schedule.last_epoch)
    schedule._last_lr = [group["lr"] for group in optimizer.param_groups]


def _arrange(checkpoint: dict[str, Any], saved: Record, present: Sequence[Sequence[str]]) -> Record:
    """Arrange the state of optimizer and schedule in a checkpoint in other groups of the same weights.

    Args:
        checkpoint: Checkpoint, changed in place.
        saved: What its config asked of the optimizer.
        present: Names of the weights of each present group.

    Returns:
        `saved` for the present groups.
    """
    places = {
        name: (group, number)
        for number, (group, name) in enumerate(
            (group, name) for group, names in enumerate(saved["weights"]) for name in names
        )
    }
    old = [places[names[0]][0] for names in present]
    numbers = [[places[name][1] for name in names] for names in present]
    (state,) = checkpoint["optimizer_states"]
    # ranks that have written nothing have no state
    if state:
        entries = [state["state"].get(number) for own in numbers for number in own]
        start, groups = 0, []
        for group, own in zip(old, numbers, strict=True):
            settings = state["param_groups"][group]
            groups.append({**settings, "params": list(range(start, start + len(own)))})
            start += len(own)
        checkpoint["optimizer_states"] = [
            {
                **state,
                "state": {
                    number: entry for number, entry in enumerate(entries) if entry is not None
                },
                "param_groups": groups,
            }
        ]
    (schedule,) = checkpoint["lr_schedulers"]
    by_group = ("base_lrs", "_last_lr", "lr_lambdas")
    checkpoint["lr_schedulers"] = [
        schedule | {key: [schedule[key][group] for group in old] for key in by_group}
    ]
    return {
        **saved,
        "weights": [list(names) for names in present],
        "groups": [saved["groups"][group] for group in old],
    }


def resume_problem(checkpoint: Mapping[str, Any], module: OptimizedModule) -> str | None:
    """Return in one line why a module's optimizer can't continue from a checkpoint, None where it can.

    Args:
        checkpoint: Checkpoint.
        module: Module to be trained.
    """
    present, saved = module.record(), checkpoint.get(RECORD)
    key = module.optimizer_key
    if saved is None:
        # of an earlier version
        groups = checkpoint["optimizer_states"][0]["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        own = [len(names) for names in present["weights"]]
        unknown = present["groups"][0].keys() - {key for group in groups for key in group}
        if unknown:
            return (
                f"{key}: its optimizer has no {sorted(unknown)[0]}, so it is not {present['class']}"
            )
        return (
            None
            if sizes == own
            else f"{key}: its optimizer has groups of {sizes} weights, not {own}"
        )
    if current(saved["class"]) != present["class"]:
        return f"{key}: its optimizer is {saved['class']}, not {present['class']}"
    then, now = ({name for names in one["weights"] for name in names} for one in (saved, present))
    for name in sorted(then ^ now):
        return f"{key}: its optimizer {'trains' if name in then else 'does not train'} {name}"
    return None


def _plain(value: Any) -> Any:
    """Return a setting as YAML would give it."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
