"""NaN and infinity: checks for them, since one multiplication spreads them to all weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import FunctionType

import torch
from torch import Tensor


class NonFiniteError(ArithmeticError):
    """A number that training goes on with is NaN or infinite. The text is one line.

    Attributes:
        on_all_ranks: Whether all ranks raise it, so that the first one alone has to report it.
    """

    on_all_ranks = False


def require_finite(values: Tensor, name: str, *, remedy: str = "return finite numbers") -> None:
    """Check that all values are finite. It waits for the device.

    Args:
        values: Any shape.
        name: What they are and what has computed them, in the plural.
        remedy: End of the message.

    Raises:
        NonFiniteError: One is not; the message has the first one and its place.

    >>> require_finite(torch.tensor([[0.0, float("nan")]]), "the advantages of Mine")
    Traceback (most recent call last):
        ...
    ragen_pl.base.finite.NonFiniteError: the advantages of Mine are not finite: nan at [0, 1]; return finite numbers
    """
    finite = values.isfinite()
    if not bool(finite.all()):
        place = (~finite).nonzero()[0]
        value = float(values[tuple(place)])
        raise NonFiniteError(f"{name} are not finite: {value} at {place.tolist()}; {remedy}")


def first_non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor with a value that is not finite, None without one.

    It waits for each device once, unless there is one.
    """
    checked = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    # finite sums need finite values, and the sum of finite values can overflow
    if _sums_are_finite(checked.values()):
        return None
    return next((name for name, tensor in checked.items() if not tensor.isfinite().all()), None)


def _sums_are_finite(tensors: Iterable[Tensor]) -> bool:
    # a sum is ten times as fast as isfinite, and takes no memory
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        total = tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
        by_device.setdefault(tensor.device, []).append(total.double())
    return all(bool(torch.stack(sums).isfinite().all()) for sums in by_device.values())


def largest(first: float, second: float) -> float:
    """Return the larger number; NaN if one of them is NaN, which `max` may drop.

    >>> max(0.0, float("nan")), largest(0.0, float("nan")), largest(float("nan"), 1.0), largest(1.0, 2.0)
    (0.0, nan, nan, 2.0)
    """
    return first if first > second or first != first else second


def class_path(component: object) -> str:
    """Return the class path of a component of a run, or of a function that is one.

    >>> class_path(1.0), class_path(largest)
    ('builtins.float', 'ragen_pl.base.finite.largest')
    """
    named = component if isinstance(component, type | FunctionType) else type(component)
    return f"{named.__module__}.{named.__qualname__}"
