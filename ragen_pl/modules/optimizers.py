"""Optimizers for weights in low precision, and the parameter groups of a training module.

AdamW's steps at a learning rate of 1e-6 are smaller than half the distance between two bfloat16 numbers, so weights in
bfloat16 would stay where they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ragen_pl.base.distributed import world_size
from ragen_pl.modules.muon import HIDDEN, MuonAdamW, evaluated, hidden_matrices

OptimizerFactory = Callable[[Iterable[Any]], Optimizer]
ParameterGroup = dict[str, Any]

LOW_PRECISION = (torch.bfloat16, torch.float16)
"""Types in which a small step is lost."""
# earlier releases round what was added up over ranks to the type of the weights
_SHARDS_KEEP_FLOAT32 = torch.__version__ >= "2.15"
# entry of the optimizer's state
_MASTER = "master"

KERNELS = ("fused", "foreach")
"""Settings of a parameter group that choose its kernels. They go by the device, so no checkpoint sets them."""
# torch 2.11 has a fused Adagrad for CPUs only
_NOT_FUSED_ON_CUDA = () if torch.__version__ >= "2.15" else (torch.optim.Adagrad,)


class MasterWeights(Optimizer):
    """Another optimizer on float32 copies of the weights that are in bfloat16 or float16.

    A step casts the gradients to float32, steps the copies and rounds them back into the weights (Micikevicius et al.,
    2018, Mixed Precision Training). Float32 weights are stepped as they are. The parameter groups hold the model's
    weights, for clipping and schedules, and the settings of the other optimizer. Its state of a weight has the entry
    `master` besides the other optimizer's own.

    Outside of DDP, gradients are accumulated in float32; those of sharded weights with torch 2.15 and later.

    Args:
        groups: Parameter groups.
        optimizer: Builds the other optimizer from parameter groups.
    """

    def __init__(self, groups: Iterable[ParameterGroup], optimizer: OptimizerFactory) -> None:
        groups = [{**group, "params": list(group["params"])} for group in groups]
        self._masters: dict[Tensor, nn.Parameter] = {}
        # the weights may still change before the first step
        self._copied = False
        self.inner = optimizer([self._of_masters(group) for group in groups])
        super().__init__(groups, dict(self.inner.defaults))

    def _of_masters(self, group: ParameterGroup) -> ParameterGroup:
        """Return a parameter group with float32 copies of its weights."""
        for weight in group["params"]:
            if weight.dtype in LOW_PRECISION:
                self._masters[weight] = nn.Parameter(weight.detach().float())
                if world_size() == 1 or (isinstance(weight, DTensor) and _SHARDS_KEEP_FLOAT32):
                    weight.grad_dtype = torch.float32
        return {
            **group,
            "params": [self._masters.get(weight, weight) for weight in group["params"]],
        }

    def add_param_group(self, param_group: ParameterGroup) -> None:
        """Add a group to both optimizers."""
        param_group = {**param_group, "params": list(param_group["params"])}
        if len(self.param_groups) == len(self.inner.param_groups):
            self.inner.add_param_group(self._of_masters(param_group))
        settings = _settings(self.inner.param_groups[len(self.param_groups)])
        super().add_param_group(settings | {"params": param_group["params"]})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the float32 copies and round them into the weights; return the closure's result."""
        loss = evaluated(closure)
        self._copy_weights()
        for ours, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(_settings(ours))
        for weight, master in self._masters.items():
            master.grad = None if weight.grad is None else weight.grad.float()
        self.inner.step()
        for weight, master in self._masters.items():
            weight.copy_(master)
            master.grad = None
        # some optimizers change their settings
        self._take_settings()
        self._take_state()
        return loss

    def _copy_weights(self) -> None:
        """Copy the weights once, unless a checkpoint held the copies."""
        if not self._copied:
            for weight, master in self._masters.items():
                master.copy_(weight)
        self._copied = True

    def _take_settings(self) -> None:
        for ours, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            ours.update(_settings(inner))

    def _take_state(self) -> None:
        """Show the other optimizer's state, and the copies, as this one's state."""
        self.state = defaultdict(dict)
        for group in self.param_groups:
            for weight in group["params"]:
                master = self._masters.get(weight)
                state = dict(self.inner.state.get(weight if master is None else master, {}))
                if master is not None and self._copied:
                    state[_MASTER] = master.data
                if state:
                    self.state[weight] = state

    def state_dict(self) -> dict[str, Any]:
        """Return the settings, and after the first step the state, as any optimizer does."""
        self._take_state()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load `state_dict`'s result.

        A state without copies, of a run in float32, leaves them to be made from the weights.

        Raises:
            ValueError: The parameter groups differ.
        """
        states = state_dict["state"]
        inner = {
            number: {name: value for name, value in state.items() if name != _MASTER}
            for number, state in states.items()
        }
        self.inner.load_state_dict(
            {**state_dict, "state": {number: state for number, state in inner.items() if state}}
        )
        weights = [weight for group in self.param_groups for weight in group["params"]]
        masters = {
            number: states.get(number, {}).get(_MASTER)
            for number, weight in enumerate(weights)
            if weight in self._masters
        }
        self._copied = bool(masters) and all(saved is not None for saved in masters.values())
        if self._copied:
            for number, saved in masters.items():
                self._masters[weights[number]].copy_(saved)
        self._take_settings()
        self._take_state()


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def parameter_groups(
    policy: nn.Module, critic: nn.Module | None, *, critic_learning_rate: float | None = None
) -> list[ParameterGroup]:
    """Return the groups `policy` and, if there is a critic, `critic`.

    Args:
        policy: Policy.
        critic: Critic, None for a policy alone.
        critic_learning_rate: The critic's learning rate; None for the optimizer's.
    """
    groups = module_groups(policy, "policy")
    if critic is not None:
        rate = {} if critic_learning_rate is None else {"lr": critic_learning_rate}
        groups += [group | rate for group in module_groups(critic, "critic")]
    return groups


def module_groups(module: nn.Module, name: str | None = None) -> list[ParameterGroup]:
    """Return a module's parameters as one group, with its hidden matrices as `HIDDEN`.

    Args:
        module: Module.
        name: Name of the group and of all groups that it is split into; None for a module that is trained alone, whose
            groups Lightning's callbacks name by number.
    """
    named = {} if name is None else {"name": name}
    return [{"params": module.parameters(), HIDDEN: hidden_matrices(module), **named}]


def build_optimizer(
    optimizer: OptimizerFactory,
    groups: Iterable[ParameterGroup],
    *,
    master_weights: bool = True,
    decay_vectors: bool = False,
) -> Optimizer:
    """Build an optimizer from parameter groups of weights that are on their device, see `fuse`.

    Args:
        optimizer: Builds the optimizer that the config names.
        groups: Parameter groups, as `trained_groups` takes them.
        master_weights: Keep float32 copies of weights in bfloat16 or float16.
        decay_vectors: Apply a weight decay to norms and biases too.

    Raises:
        ValueError: Weights in float16 are to be trained.
    """
    groups = trained_groups(optimizer, groups, decay_vectors=decay_vectors)
    weights = [weight for group in groups for weight in group["params"]]
    if any(weight.dtype is torch.float16 for weight in weights):
        raise ValueError(
            "model.build.dtype=float16: the gradients of float16 weights underflow; set model.build.dtype=bfloat16, or "
            "model.build.dtype=float32 and trainer.precision=16-mixed"
        )
    low = any(weight.dtype in LOW_PRECISION for weight in weights)
    built = MasterWeights(groups, optimizer) if low and master_weights else optimizer(groups)
    stepping: Any = stepping_optimizer(built)
    stepping.register_load_state_dict_pre_hook(_with_own_kernels)
    # else a gradient scaler leaves it to a fused optimizer to unscale gradients, which are clipped before
    stepping._step_supports_amp_scaling = False
    fuse(built)
    return built


def fuse(optimizer: Optimizer, *, device: str | None = None) -> bool:
    """Let an optimizer step by fused kernels on CUDA, where it has them and its settings name no other ones.

    torch's own choice there is `foreach`, lists of all weights, whose temporaries are as large as a float32 state.

    Args:
        optimizer: Optimizer, changed in place.
        device: Type of the device that the weights will be on; None for the one that they are on.

    Returns:
        Whether this has chosen fused kernels for any group.
    """
    stepping, chosen = stepping_optimizer(optimizer), False
    if isinstance(stepping, _NOT_FUSED_ON_CUDA):
        return False
    for ours, group in zip(optimizer.param_groups, stepping.param_groups, strict=True):
        weights = group["params"]
        on_cuda = bool(weights) and all(
            weight.is_floating_point() and (device or weight.device.type) == "cuda"
            for weight in weights
        )
        is_open = all(name in group and group[name] is None for name in KERNELS)
        if on_cuda and is_open and not group.get("differentiable"):
            ours["fused"] = group["fused"] = chosen = True
    return chosen


def stepping_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that computes the steps, which float32 copies may surround."""
    return optimizer.inner if isinstance(optimizer, MasterWeights) else optimizer


def _with_own_kernels(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with the optimizer's own kernels, by which torch places the number of steps too."""
    own, saved = optimizer.param_groups, state_dict["param_groups"]
    if len(own) != len(saved):
        # torch refuses it
        return state_dict
    kernels = [{name: group[name] for name in KERNELS if name in group} for group in own]
    groups = [group | chosen for group, chosen in zip(saved, kernels, strict=True)]
    return {**state_dict, "param_groups": groups}


def trained_groups(
    optimizer: OptimizerFactory, groups: Iterable[ParameterGroup], *, decay_vectors: bool = False
) -> list[ParameterGroup]:
    """Return the groups that an optimizer gets, in its order.

    Args:
        optimizer: Builds the optimizer that the config names.
        groups: Parameter groups, each with a `name`, and those of `module_groups` with their hidden matrices; frozen
            parameters are left out.
        decay_vectors: Apply a weight decay to norms and biases too. Otherwise they become a group of their own.

    Returns:
        Groups of one module, such as `policy`, `policy/vectors` and `policy/hidden`: see `module_name`.
    """
    hidden: set[Tensor] = set()
    trained: list[ParameterGroup] = []
    for group in groups:
        hidden |= group.get(HIDDEN, set())
        weights = [weight for weight in group["params"] if weight.requires_grad]
        settings = {key: value for key, value in group.items() if key != HIDDEN}
        trained.append({**settings, "params": weights})
    probe = optimizer([nn.Parameter(torch.zeros(1))])
    if probe.defaults.get("weight_decay") and not decay_vectors:
        trained = [part for group in trained for part in _split(group)]
    if isinstance(probe, MuonAdamW):
        trained = [part for group in trained for part in _split_hidden(group, hidden)]
        # in the order that the optimizer has them
        trained.sort(key=lambda group: not group[HIDDEN])
    return trained


def class_of(optimizer: Optimizer) -> str:
    """Return the name of an optimizer's class as the config names it."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _split(group: ParameterGroup) -> list[ParameterGroup]:
    """Return a group's matrices, and its vectors without weight decay."""
    matrices = [weight for weight in group["params"] if weight.ndim > 1]
    vectors = [weight for weight in group["params"] if weight.ndim <= 1]
    apart = {**_renamed(group, "vectors"), "params": vectors, "weight_decay": 0.0}
    return [part for part in ({**group, "params": matrices}, apart) if part["params"]]


def _split_hidden(group: ParameterGroup, hidden: set[Tensor]) -> list[ParameterGroup]:
    """Return a group's hidden matrices, and its other weights."""
    apart = {**_renamed(group, HIDDEN), "params": [w for w in group["params"] if w in hidden]}
    others = {**group, "params": [w for w in group["params"] if w not in hidden]}
    return [part for part in ({**apart, HIDDEN: True}, {**others, HIDDEN: False}) if part["params"]]


def _renamed(group: ParameterGroup, part: str) -> ParameterGroup:
    """Return a group with the name of a part of it, for `LearningRateMonitor` wants names that differ."""
    return {**group, "name": f"{group['name']}/{part}"} if "name" in group else group


def module_name(group: ParameterGroup) -> str:
    """Return the name of the module whose weights a group of `trained_groups` holds, empty for a nameless group.

    Examples:
        >>> module_name({"name": "policy/vectors", "params": []})
        'policy'
    """
    name: str = group.get("name", "")
    return name.partition("/")[0]


def schedule_by_iteration(
    optimizer: Optimizer, *, iterations: int | None, warm_up: int, end: float
) -> LambdaLR:
    """Return a schedule that is stepped after each iteration: a linear rise, times a linear decay over the run.

    Args:
        optimizer: Optimizer.
        iterations: Number of iterations; -1 for a run without a last one, which has no decay.
        warm_up: Number of first iterations of the rise, the last of which has the full learning rate.
        end: Factor of the learning rate at the end of the decay.
    """
    last = max(1, iterations or 1)
    fallen = 1.0 if iterations == -1 else end

    def factor(iteration: int) -> float:
        rise = min(1.0, (iteration + 1) / max(1, warm_up))
        return rise * (1.0 - (1.0 - fallen) * min(1.0, iteration / last))

    return LambdaLR(optimizer, [factor] * len(optimizer.param_groups))
