"""Signatures of classes and functions, read from their source files by griffe.

Nothing is imported, so a wrong setting is found before torch is. Annotations are evaluated with typing,
`annotated_types` and `ragen_pl.base.constraints`; enumerations, type aliases and dataclasses of the module or of its
imports are read the same way. An annotation that cannot be evaluated accepts everything.
"""

from __future__ import annotations

import ast
import builtins
import collections.abc
import functools
import keyword
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import annotated_types
import griffe

from ragen_pl.base import constraints
from ragen_pl.base.constraints import did_you_mean
from ragen_pl.base.former_names import current
from ragen_pl.base.instances import instances

_LIGHT = {
    "typing": typing,
    "collections.abc": collections.abc,
    "annotated_types": annotated_types,
    "ragen_pl.base.constraints": constraints,
}
_BUILTINS = ("bool", "int", "float", "str", "dict", "list", "tuple", "object")
_TRUST = "needs_trust"
_NO_BASES = ("object", "Protocol", "Generic", "ABC", "TypedDict")


class SignatureError(ValueError):
    """A class path without a class or function."""


@dataclass(frozen=True)
class Parameter:
    """An argument of a class or function, or a key of a node.

    Attributes:
        annotation: Its annotation; `Any` without one.
        by_name: Whether it can only be given by name.
        documented_in: Paths of the classes and functions whose docstrings may describe it, the nearest first.
    """

    annotation: Any = Any
    by_name: bool = True
    documented_in: tuple[str, ...] = ()


@dataclass(frozen=True)
class Signature:
    """Arguments of a class or function, or keys of a node.

    Attributes:
        name: Name of the class or function; empty for a node without.
        parameters: Arguments by name.
        closed: Whether no other arguments are possible.
        returns: Return annotation.
    """

    name: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    closed: bool = True
    returns: Any = Any


# of what is known only after an import
UNKNOWN = Signature(closed=False)


class ClassInSource:
    """Base of the types that stand for classes read from source.

    Attributes:
        target: Class path.
        is_mapping: Whether it is a `TypedDict`.
    """

    target: str = ""
    is_mapping: bool = False


@functools.cache
def read_signature(target: str) -> Signature:
    """Return the signature of a class path; an open one without names if it is known only after an import.

    Raises:
        SignatureError: There is no such class or function; with the nearest name that exists.
    """
    found = definition_at(target)
    if found is not None:
        return _of_function(found) if isinstance(found, griffe.Function) else _of_class(found)
    module_name, _, name = target.rpartition(".")
    module = _module(module_name)
    if module is None:
        raise SignatureError(f"there is no module {module_name}")
    # an import, or of a module with a star import or `__getattr__`
    if name in module.members or any(m.endswith(("*", "__getattr__")) for m in module.members):
        return UNKNOWN
    if _module(target) is not None:
        raise SignatureError("expected a class, found a module")
    near = did_you_mean(name, [other for other in module.members if other[:1] != "_"])
    raise SignatureError(f"{module_name} has no {name}{near or '; give package.module.Class'}")


def definition_at(target: str) -> griffe.Class | griffe.Function | None:
    """Return the class or function that a module's source file defines by this name; None if it has none."""
    member = _member(target)
    return member if isinstance(member, griffe.Class | griffe.Function) else None


def class_that_defines(method: str, target: str) -> str | None:
    """Return the class path of a class or of the first of its bases that defines a method.

    Nothing is imported. It is None where no class in a source file defines it, and where the target is no class.

    Args:
        method: Name of the method.
        target: Class path of the class; its module may import the class from another.
    """
    cls = _class_at(target)
    if cls is None or isinstance(cls.members.get(method), griffe.Function):
        return None if cls is None else cls.path
    return next(filter(None, (class_that_defines(method, base) for base in _bases(cls))), None)


def declared_trust(target: str) -> tuple[str, ...] | None:
    """Return the arguments that a class or function declares as in need of trust; see `base.checked.needs_trust`.

    Nothing is imported. It is None where it declares nothing; bases do not count.

    Args:
        target: Class path.
    """
    found = definition_at(target)
    if isinstance(found, griffe.Function):
        values = [str(mark.value) for mark in found.decorators]
        values = [value for value in values if value.startswith(_TRUST)]
    else:
        attribute = found.members.get(_TRUST) if found is not None else None
        values = [str(attribute.value)] if isinstance(attribute, griffe.Attribute) else []
    for value in values:
        match ast.parse(value, mode="eval").body:
            case ast.Call(args=items) | ast.Tuple(elts=items):
                return tuple(str(ast.literal_eval(item)) for item in items)
    return None


def type_at(target: str) -> Any:
    """Return the object that annotations in source files name by a dotted path.

    Raises:
        KeyError: It is known only after an import.
    """
    module_name, _, name = target.rpartition(".")
    if target in _LIGHT:
        return _LIGHT[target]
    if module_name in _LIGHT:
        return getattr(_LIGHT[module_name], name)
    member = _member(target)
    if isinstance(member, griffe.Alias):
        return type_at(member.target_path)
    if isinstance(member, griffe.Class):
        return _type_of(member)
    if not isinstance(member, griffe.Attribute):
        raise KeyError(name)
    return eval(str(member.value), {"__builtins__": {}}, _Scope(module_name))


def is_class(annotation: Any) -> bool:
    """Return whether an annotation is a class that is read from source, and no mapping type."""
    return _is_in_source(annotation) and not annotation.is_mapping


def signature_of(annotation: Any) -> Signature:
    """Return the signature of a class that is read from source, an open one for any other type."""
    return read_signature(annotation.target) if _is_in_source(annotation) else UNKNOWN


def _is_in_source(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, ClassInSource)


@functools.cache
def _module(name: str) -> griffe.Module | None:
    """Return a module's definitions and imports; None if it has no source file."""
    name = current(name)
    first, *inner = name.split(".")
    try:
        spec = find_spec(first)
    except ValueError:
        return None
    if spec is None:
        return None
    folders = spec.submodule_search_locations
    path = Path(next(iter(folders))).joinpath(*inner) if folders else Path(str(spec.origin))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return None
    # relative imports start from the packages around the module
    parent = None
    for package in name.split(".")[:-1]:
        parent = griffe.Module(package, parent=parent)
    code = file.read_text(encoding="utf-8")
    return griffe.visit(name.rpartition(".")[2], filepath=file, code=code, parent=parent)


def _member(target: str) -> griffe.Object | griffe.Alias | None:
    """Return the definition or import that a dotted path names; None if there is none in a source file."""
    module_name, _, name = target.rpartition(".")
    module = _module(module_name) if module_name else None
    return module.members.get(name) if module else None


def _class_at(target: str) -> griffe.Class | None:
    """Return the class of a class path, also through imports; None if there is none in a source file."""
    member = _member(target)
    if isinstance(member, griffe.Alias):
        return _class_at(member.target_path)
    return member if isinstance(member, griffe.Class) else None


def _bases(cls: griffe.Class) -> list[str]:
    """Return the class paths of the bases of a class, as its module names them."""
    return [f"{cls.module.path}.{str(base).partition('[')[0]}" for base in cls.bases]


def _of_function(function: griffe.Function, *, skip: int = 0) -> Signature:
    scope = _Scope(function.module.path)
    parameters: dict[str, Parameter] = {}
    marks = [str(mark.value) for mark in function.decorators]
    closed = all("checked" in mark or mark.startswith(_TRUST) for mark in marks)
    for one in [*function.parameters][skip:]:
        annotation = scope.evaluate(one.annotation)
        if one.kind is griffe.ParameterKind.var_keyword:
            settings = typing.get_args(annotation)[:1]
            closed = closed and typing.get_origin(annotation) is typing.Unpack
            parameters |= signature_of(*settings).parameters if settings else {}
        elif one.kind is not griffe.ParameterKind.var_positional:
            by_name = one.kind is griffe.ParameterKind.keyword_only
            parameters[one.name] = Parameter(annotation, by_name, (function.path,))
    return Signature(function.name, parameters, closed, returns=scope.evaluate(function.returns))


def _of_class(cls: griffe.Class) -> Signature:
    bases = [_of_base(base) for base in _bases(cls)]
    parameters = {name: one for base in bases for name, one in base.parameters.items()}
    inherited = {name: one.documented_in for name, one in parameters.items()}
    closed = all(base.closed for base in bases)
    init = cls.members.get("__init__")
    if isinstance(init, griffe.Function):
        function = _of_function(init, skip=1)
        parameters, closed = dict(function.parameters), function.closed
    elif _is_typed_dict(cls) or any("dataclass" in str(mark.value) for mark in cls.decorators):
        parameters |= _fields(cls)
    documented = {
        name: replace(one, documented_in=(cls.path, *one.documented_in, *inherited.get(name, ())))
        for name, one in parameters.items()
    }
    return Signature(cls.name, documented, closed)


def _of_base(target: str) -> Signature:
    if target.rpartition(".")[2] in _NO_BASES:
        return Signature()
    cls = _class_at(target)
    return UNKNOWN if cls is None else _of_class(cls)


def _fields(cls: griffe.Class) -> dict[str, Parameter]:
    """Return the fields of a dataclass or `TypedDict`, without those of its bases.

    The field of a key that is a word of Python ends with an underscore.
    """
    scope = _Scope(cls.module.path)
    return {
        name[:-1] if keyword.iskeyword(name[:-1]) else name: Parameter(
            scope.evaluate(one.annotation)
        )
        for name, one in cls.members.items()
        if isinstance(one, griffe.Attribute)
        and not name.startswith("_")
        # others are class variables
        and one.annotation is not None
        and "instance-attribute" in one.labels
        and "init=False" not in str(one.value)
    }


def _is_typed_dict(cls: griffe.Class) -> bool:
    return any("TypedDict" in str(base) for base in cls.bases)


class _Scope(dict[str, Any]):
    """Names that the annotations of a module may use, each resolved when it is asked for."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self.module = module

    def __missing__(self, name: str) -> Any:
        is_builtin = name in _BUILTINS
        return getattr(builtins, name) if is_builtin else type_at(f"{self.module}.{name}")

    def evaluate(self, annotation: griffe.Expr | str | None) -> Any:
        """Return the value of an annotation, `Any` where it has none or cannot be evaluated."""
        try:
            return Any if annotation is None else eval(str(annotation), {"__builtins__": {}}, self)
        except Exception:  # annotations of other packages may raise anything
            return Any


def _type_of(cls: griffe.Class) -> Any:
    """Return an enumeration of texts, or the type that stands for any other class."""
    if "StrEnum" in map(str, cls.bases):
        members = instances(cls.members.values(), griffe.Attribute)
        # a property has no value
        words = {one.name: ast.literal_eval(str(one.value)) for one in members if one.value}
        return StrEnum(cls.name, words)
    place = {"target": cls.path, "is_mapping": _is_typed_dict(cls)}
    return type(cls.name, (ClassInSource,), place)
