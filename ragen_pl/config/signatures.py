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
import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import annotated_types

from ragen_pl import constraints
from ragen_pl.config.docstrings import described_names, first_sentence

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
    """Names and annotations of the arguments of a class or function.

    Attributes:
        name: name of the class or function.
        parameters: annotations by name.
        keywords: arguments that can only be given by name.
        closed: whether no other arguments are possible.
        returns: return annotation.
        summary: first sentence of the docstring.
        descriptions: the docstring's descriptions of arguments, those of base classes included.
    """

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    keywords: tuple[str, ...] = ()
    closed: bool = True
    returns: Any = Any
    summary: str = ""
    descriptions: dict[str, str] = field(default_factory=dict)


class ClassInSource:
    """Base of the types that stand for classes read from source; `target` is the class path."""

    target: str = ""


@dataclass(frozen=True)
class _Module:
    """A parsed source file and its dotted name."""

    name: str
    tree: ast.Module


def read_signature(target: str) -> Signature | None:
    """Return the signature of a class path, None if it is known only after an import.

    Raises:
        SignatureError: there is no such class or function; with the nearest name that exists.
    """
    module_name, _, name = target.rpartition(".")
    module = _module(module_name)
    if module is None:
        raise SignatureError(f"there is no module {module_name}")
    definition = _definition(module, name)
    if definition is None:
        names = _names(module.tree)
        if name in names:
            return None
        if _module(target) is not None:
            raise SignatureError("expected a class, found a module")
        close = get_close_matches(name, [other for other in names if other[:1] != "_"], n=1)
        raise SignatureError(
            f"{module_name} has no {name}; "
            + (f"did you mean {close[0]}?" if close else "give package.module.Class")
        )
    if isinstance(definition, ast.FunctionDef):
        return _documented(_of_function(module, definition, skip=0), module, definition)
    signature = _of_class(module, definition)
    return None if signature is None else _documented(signature, module, definition)


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
    if any(isinstance(item, ast.FunctionDef) and item.name == method for item in definition.body):
        return target
    places = (_place_of(module, ast.unparse(base)) for base in definition.bases)
    found = (class_that_defines(method, place) for place in places if place is not None)
    return next((place for place in found if place is not None), None)


def _documented(
    signature: Signature, module: _Module, node: ast.ClassDef | ast.FunctionDef
) -> Signature:
    """Return a signature with the descriptions in the docstrings of its class and of base classes."""
    inherited: dict[str, str] = {}
    for base in node.bases if isinstance(node, ast.ClassDef) else ():
        parent = _of_base(module, base)
        inherited |= parent.descriptions if parent is not None else {}
    text = ast.get_docstring(node) or ""
    return replace(
        signature,
        summary=first_sentence(text),
        descriptions=inherited | signature.descriptions | described_names(text),
    )


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
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
    return None


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
            (settings,) = typing.get_args(annotation)
            fields = _fields(settings)
            parameters |= fields
            descriptions = dict(descriptions_of(settings))
            keywords += fields
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


def _of_class(module: _Module, node: ast.ClassDef) -> Signature | None:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            init = _of_function(module, item, skip=1)
            return replace(init, name=node.name, returns=Any)
    inherited: dict[str, Any] = {}
    keywords: tuple[str, ...] = ()
    closed = True
    for base in node.bases:
        signature = _of_base(module, base)
        if signature is None:
            closed = False
        else:
            inherited |= signature.parameters
            keywords += signature.keywords
            closed &= signature.closed
    if any("dataclass" in ast.unparse(mark) for mark in node.decorator_list):
        inherited |= _annotated_names(module, node)
        keywords = tuple(inherited)
    return Signature(node.name, inherited, keywords, closed)


def _of_base(module: _Module, base: ast.expr) -> Signature | None:
    name = ast.unparse(base).partition("[")[0]
    if name in ("object", "Protocol", "Generic", "ABC"):
        return Signature(name)
    place = _place_of(module, name)
    if place is None:
        return None
    try:
        return read_signature(place)
    except SignatureError:
        return None


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
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return f"{node.module}.{alias.name}"
    return None


def _fields(annotation: Any) -> dict[str, Any]:
    """Return the fields of a class that is read from source, empty for any other type."""
    if isinstance(annotation, type) and issubclass(annotation, ClassInSource):
        module_name, _, name = annotation.target.rpartition(".")
        module = _module(module_name)
        node = _definition(module, name) if module else None
        if module and isinstance(node, ast.ClassDef):
            return _annotated_names(module, node)
    return {}


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
        return type(node.name, (ClassInSource,), {"target": f"{self.module.name}.{node.name}"})


def _assigned(item: ast.stmt, name: str) -> ast.expr | None:
    if isinstance(item, ast.Assign) and [ast.unparse(target) for target in item.targets] == [name]:
        return item.value
    if isinstance(item, ast.AnnAssign) and ast.unparse(item.target) == name:
        return item.value
    return None


def is_class(annotation: Any) -> bool:
    """Return whether an annotation is a class that is read from source, and no mapping type."""
    if not (isinstance(annotation, type) and issubclass(annotation, ClassInSource)):
        return False
    module_name, _, name = annotation.target.rpartition(".")
    module = _module(module_name)
    node = _definition(module, name) if module else None
    bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
    return not any("TypedDict" in base for base in bases)


def fields_of(annotation: Any) -> Mapping[str, Any] | None:
    """Return the names and annotations of a mapping type's fields, None for any other type."""
    if typing.is_typeddict(annotation):
        return typing.get_type_hints(annotation, include_extras=True)
    return _fields(annotation) or None


def descriptions_of(annotation: Any) -> Mapping[str, str]:
    """Return the descriptions of a type's fields, empty for a type without fields."""
    if typing.is_typeddict(annotation):
        return described_names(inspect.cleandoc(annotation.__doc__ or ""))
    if isinstance(annotation, type) and issubclass(annotation, ClassInSource):
        signature = read_signature(annotation.target)
        return {} if signature is None else signature.descriptions
    return {}
