"""Signatures of the classes and functions in a configuration, read from source files.

Importing a class would load torch. Annotations are evaluated with typing, `annotated_types` and
`ragen_pl.constraints`; enumerations, type aliases and dataclasses of the module or of its imports are read the
same way. An annotation that cannot be evaluated accepts everything.
"""

from __future__ import annotations

import ast
import builtins
import collections.abc
import functools
import typing
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import annotated_types

from ragen_pl import constraints
from ragen_pl.config.docstrings import described_names, first_sentence
from ragen_pl.constraints import did_you_mean

_LIGHT = {
    "typing": typing,
    "collections.abc": collections.abc,
    "annotated_types": annotated_types,
    "ragen_pl.constraints": constraints,
}
_BUILTINS = {
    name: getattr(builtins, name)
    for name in ("bool", "int", "float", "str", "dict", "list", "tuple", "object")
}


class SignatureError(ValueError):
    """A class path without a class or function."""


@dataclass(frozen=True)
class Signature:
    """Names and annotations of the arguments of a class or function, or of the keys of a node.

    Attributes:
        name: name of the class or function; empty for a node without.
        parameters: annotations by name.
        keywords: arguments that can only be given by name.
        closed: whether no other arguments are possible.
        returns: return annotation.
        summary: first sentence of the docstring.
        descriptions: the docstring's descriptions of arguments, those of base classes included.
    """

    name: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    keywords: tuple[str, ...] = ()
    closed: bool = True
    returns: Any = Any
    summary: str = ""
    descriptions: dict[str, str] = field(default_factory=dict)


# of what is known only after an import
UNKNOWN = Signature(closed=False)


class ClassInSource:
    """Base of the types that stand for classes read from source.

    Attributes:
        target: class path.
        is_mapping: whether it is a `TypedDict`.
    """

    target: str = ""
    is_mapping: bool = False


@dataclass(frozen=True)
class _Module:
    """A parsed source file and its dotted name."""

    name: str
    tree: ast.Module


@functools.cache
def read_signature(target: str) -> Signature:
    """Return the signature of a class path; an open one without names if it is known only after an import.

    Raises:
        SignatureError: there is no such class or function; with the nearest name that exists.
    """
    module_name, _, name = target.rpartition(".")
    module = _module(module_name)
    if module is None:
        raise SignatureError(f"there is no module {module_name}")
    definition = _definition(module, name)
    if isinstance(definition, ast.FunctionDef):
        signature = _of_function(module, definition, skip=0)
        return _documented(signature, ast.get_docstring(definition))
    if definition is not None:
        return _of_class(module, definition)
    names = _names(module.tree)
    if name in names:
        return UNKNOWN
    if _module(target) is not None:
        raise SignatureError("expected a class, found a module")
    near = did_you_mean(name, [other for other in names if other[:1] != "_"])
    raise SignatureError(f"{module_name} has no {name}{near or '; give package.module.Class'}")


def _documented(signature: Signature, docstring: str | None) -> Signature:
    descriptions = signature.descriptions | described_names(docstring or "")
    return replace(signature, summary=first_sentence(docstring or ""), descriptions=descriptions)


def class_that_defines(method: str, target: str) -> str | None:
    """Return the class path of a class or of the first of its bases that defines a method.

    Nothing is imported. It is None where no class in a source file defines it, and where the target is no class.

    Args:
        method: name of the method.
        target: class path of the class; its module may import the class from another.
    """
    module_name, _, name = target.rpartition(".")
    module = _module(module_name)
    if module is None:
        return None
    definition = _definition(module, name)
    if definition is None:
        place = _place_of(module, name)
        return None if place is None else class_that_defines(method, place)
    if not isinstance(definition, ast.ClassDef):
        return None
    if any(_is_function(item, method) for item in definition.body):
        return target
    places = (_place_of(module, ast.unparse(base)) for base in definition.bases)
    found = (class_that_defines(method, place) for place in places if place is not None)
    return next((place for place in found if place is not None), None)


@functools.cache
def _module(name: str) -> _Module | None:
    parts = name.split(".")
    try:
        spec = find_spec(parts[0])
    except ValueError:
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        path = Path(next(iter(spec.submodule_search_locations))).joinpath(*parts[1:])
    else:
        path = Path(str(spec.origin))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return None
    return _Module(name, ast.parse(file.read_text(encoding="utf-8")))


def _definition(module: _Module, name: str) -> ast.ClassDef | ast.FunctionDef | None:
    found = (node for node in module.tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef))
    return next((node for node in found if node.name == name), None)


def _names(tree: ast.Module) -> set[str]:
    """Return the names that a module defines, imports or assigns, at any depth."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _of_function(module: _Module, node: ast.FunctionDef, *, skip: int) -> Signature:
    scope = _Scope(module)
    given = [*node.args.posonlyargs, *node.args.args][skip:]
    parameters = {
        argument.arg: scope.evaluate(argument.annotation)
        for argument in (*given, *node.args.kwonlyargs)
    }
    keywords = [argument.arg for argument in node.args.kwonlyargs]
    closed = node.args.kwarg is None
    descriptions: dict[str, str] = {}
    if node.args.kwarg is not None:
        annotation = scope.evaluate(node.args.kwarg.annotation)
        if typing.get_origin(annotation) is typing.Unpack:
            settings = signature_of(typing.get_args(annotation)[0])
            parameters |= settings.parameters
            descriptions = settings.descriptions
            keywords += settings.parameters
            closed = True
    wrapped = any("checked" not in ast.unparse(mark) for mark in node.decorator_list)
    return Signature(
        node.name,
        parameters,
        tuple(keywords),
        closed and not wrapped,
        scope.evaluate(node.returns),
        descriptions=descriptions,
    )


def _of_class(module: _Module, node: ast.ClassDef) -> Signature:
    bases = [_of_base(module, base) for base in node.bases]
    descriptions = {name: text for base in bases for name, text in base.descriptions.items()}
    init = next((item for item in node.body if _is_function(item, "__init__")), None)
    if isinstance(init, ast.FunctionDef):
        signature = _of_function(module, init, skip=1)
    else:
        parameters = {name: part for base in bases for name, part in base.parameters.items()}
        keywords = [name for base in bases for name in base.keywords]
        if _is_typed_dict(node) or any("dataclass" in ast.unparse(m) for m in node.decorator_list):
            parameters |= _annotated_names(module, node)
            keywords = list(parameters)
        closed = all(base.closed for base in bases)
        signature = Signature(node.name, parameters, tuple(keywords), closed)
    descriptions |= signature.descriptions
    signature = replace(signature, name=node.name, returns=Any, descriptions=descriptions)
    return _documented(signature, ast.get_docstring(node))


def _is_typed_dict(node: ast.ClassDef) -> bool:
    return any("TypedDict" in ast.unparse(base) for base in node.bases)


def _is_function(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == name


def _of_base(module: _Module, base: ast.expr) -> Signature:
    name = ast.unparse(base).partition("[")[0]
    if name in ("object", "Protocol", "Generic", "ABC", "TypedDict"):
        return Signature()
    place = _place_of(module, name)
    try:
        return read_signature(place) if place is not None else UNKNOWN
    except SignatureError:
        return UNKNOWN


def _annotated_names(module: _Module, node: ast.ClassDef) -> dict[str, Any]:
    scope = _Scope(module)
    return {
        item.target.id: scope.evaluate(item.annotation)
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and not item.target.id.startswith("_")
        and "ClassVar" not in ast.unparse(item.annotation)
        and "init=False" not in (ast.unparse(item.value) if item.value else "")
    }


def _place_of(module: _Module, name: str) -> str | None:
    """Return the class path of a name that a module defines or imports."""
    if _definition(module, name) is not None:
        return f"{module.name}.{name}"
    return _imports(module).get(name)


@functools.cache
def _imports(module: _Module) -> dict[str, str]:
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
    }


class _Scope(dict[str, Any]):
    """Names that the annotations of a module may use, each resolved when it is asked for."""

    def __init__(self, module: _Module) -> None:
        super().__init__()
        self.module = module

    def evaluate(self, node: ast.expr | None) -> Any:
        """Return the value of an annotation, `Any` where it has none or cannot be evaluated."""
        if node is None:
            return Any
        source = (
            node.value
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            else ast.unparse(node)
        )
        try:
            return eval(source, {"__builtins__": {}}, self)
        except Exception:  # annotations of other packages may raise anything
            return Any

    def __missing__(self, name: str) -> Any:
        if name in _BUILTINS:
            return _BUILTINS[name]
        node = _definition(self.module, name)
        if isinstance(node, ast.ClassDef):
            return self._class(node)
        for item in self.module.tree.body:
            value = _assigned(item, name)
            if value is not None:
                return eval(ast.unparse(value), {"__builtins__": {}}, self)
        return self._imported(name)

    def _imported(self, name: str) -> Any:
        place = _place_of(self.module, name)
        if place is None:
            raise KeyError(name)
        module_name, _, name = place.rpartition(".")
        if module_name in _LIGHT:
            return getattr(_LIGHT[module_name], name)
        module = _module(module_name)
        if module is None:
            raise KeyError(name)
        return _Scope(module)[name]

    def _class(self, node: ast.ClassDef) -> Any:
        bases = [ast.unparse(base) for base in node.bases]
        if "StrEnum" in bases:
            words = {
                ast.unparse(item.targets[0]): ast.literal_eval(item.value)
                for item in node.body
                if isinstance(item, ast.Assign)
            }
            return StrEnum(node.name, words)
        place = {"target": f"{self.module.name}.{node.name}", "is_mapping": _is_typed_dict(node)}
        return type(node.name, (ClassInSource,), place)


def _assigned(item: ast.stmt, name: str) -> ast.expr | None:
    if isinstance(item, ast.Assign) and [ast.unparse(target) for target in item.targets] == [name]:
        return item.value
    if isinstance(item, ast.AnnAssign) and ast.unparse(item.target) == name:
        return item.value
    return None


def class_in_source(target: str) -> Any:
    """Return the annotation for a class path, as annotations in source files name it."""
    module_name, _, name = target.rpartition(".")
    module = _module(module_name)
    assert module is not None
    return _Scope(module)[name]


def is_class(annotation: Any) -> bool:
    """Return whether an annotation is a class that is read from source, and no mapping type."""
    return _is_in_source(annotation) and not annotation.is_mapping


def _is_in_source(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, ClassInSource)


def signature_of(annotation: Any) -> Signature:
    """Return the signature of a class that is read from source, an open one for any other type."""
    return read_signature(annotation.target) if _is_in_source(annotation) else UNKNOWN
