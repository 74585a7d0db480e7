"""Hold a composed configuration against the types of its settings, key by key."""

from __future__ import annotations

import sys
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from ragen_pl.base.constraints import (
    Arguments,
    ArgumentsOf,
    Open,
    TextOnly,
    did_you_mean,
    options,
    problem,
    shown,
    unwrapped,
)
from ragen_pl.base.instances import instances
from ragen_pl.config.errors import ConfigError
from ragen_pl.config.nodes import leaves, plain
from ragen_pl.config.relations import relation_problems
from ragen_pl.config.signatures import (
    UNKNOWN,
    Parameter,
    Signature,
    SignatureError,
    is_class,
    read_signature,
    signature_of,
    type_at,
)

Settings = type_at("ragen_pl.config.schema.Settings")
HYDRA = {
    "_partial_": Parameter(bool),
    "_recursive_": Parameter(bool),
    "_convert_": Parameter(Literal["none", "partial", "object", "all"]),
}
"""Keys of Hydra's own in a node with `_target_`."""

# packages of optimizers that docs/training.md names; nobody is advised to install what was typed
_NAMED_IN_DOCS = ("bitsandbytes", "torchao")
_Problems = Iterator[tuple[str, str]]
_Node = Mapping[str, Any]


def check_config(cfg: DictConfig) -> None:
    """Check a configuration for unknown keys, missing values and invalid values.

    Raises:
        ConfigError: With one line that names the key, the value and what was expected.
    """
    walk = _Walk(plain_values(cfg))
    problems = list(walk.problems(walk.root, Settings, key="", parent={}))
    # a wrong value is reported at its own key, not at a key that refers to it
    problems.sort(key=lambda item: _refers(cfg, item[0]))
    for _, message in problems:
        raise ConfigError(message)
    # rules of nodes before those of the classes that they name
    classes = sorted(walk.classes.items(), key=lambda item: item[1].endswith("._target_"))
    for message in relation_problems(cfg, dict(classes)):
        raise ConfigError(message)
    _check_images(cfg)


def takes_argument(cfg: DictConfig, key: str) -> bool:
    """Return whether a setting is an argument that the class in a sibling setting takes, or a part of one.

    Args:
        cfg: The configuration, which has the setting.
        key: Its full name, such as `env.kwargs.size`.
    """
    # values are checked later
    walk = _Walk(plain(cfg, resolve=False))
    for _ in walk.problems(walk.root, Settings, key="", parent={}):
        pass
    if key in walk.unknown or not any(key.startswith(f"{node}.") for node in walk.arguments):
        return False
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(cfg, parent)
    return isinstance(node, DictConfig) and name in node


def plain_values(cfg: DictConfig) -> dict[str, Any]:
    """Return a configuration as plain values.

    Raises:
        ConfigError: A value is missing (`???`) or refers to one that does not exist.
    """
    try:
        return plain(cfg, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} has no value; set {error.full_key}=…") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from error


def _refers(cfg: DictConfig, key: str) -> bool:
    """Return whether a setting, or a node that it is in, refers to another one."""
    node: Any = cfg
    for name in key.split("."):
        # a name may have a dot in it
        if not isinstance(node, DictConfig) or name not in node:
            return False
        if OmegaConf.is_interpolation(node, name):
            return True
        node = OmegaConf.select(node, name) if isinstance(node, DictConfig) else None
    return False


class _Walk:
    """A walk through a configuration.

    Args:
        root: The configuration as plain values.

    Attributes:
        classes: Paths of the classes that it has passed, each with the key that names it.
        arguments: Keys of the nodes with arguments of a class that a sibling names.
        unknown: Keys that no class and no description has.
    """

    def __init__(self, root: _Node) -> None:
        self.root = root
        self.classes: dict[str, str] = {}
        self.arguments: list[str] = []
        self.unknown: list[str] = []

    def problems(self, value: Any, annotation: Any, *, key: str, parent: _Node) -> _Problems:
        """Yield the key and one line for each wrong setting in a node or leaf.

        Args:
            value: The node or leaf.
            annotation: Its type.
            key: Its full name.
            parent: The node that it is in.
        """
        if isinstance(value, list) and (
            lists := [one for one in options(annotation) if problem(one, []) is None]
        ):
            item = (*typing.get_args(lists[0]), Any)[0]
            for index, member in enumerate(value):
                yield from self.problems(member, item, key=f"{key}.{index}", parent={})
        elif (expected := problem(annotation, value)) is not None:
            yield key, f"{key}={shown(value)}: {expected}{_hint(annotation, key)}"
        elif isinstance(value, dict):
            yield from self._problems_of_node(value, annotation, key=key, parent=parent)

    def _problems_of_node(
        self, node: _Node, annotation: Any, *, key: str, parent: _Node
    ) -> _Problems:
        # the file of logger=none is an empty group
        if (node or key != "logger") and "_target_" not in node and needs_class(annotation):
            message = (
                f"{key}={shown(node)}: found a group without _target_, which names the class to build; set "
                f"{key}._target_=package.module.Class"
            )
            yield key, message + (f", or {key}=null" if problem(annotation, None) is None else "")
            return
        self.classes |= dict.fromkeys(_arguments_in(annotation), key or "the configuration")
        if instances(_marks(annotation), ArgumentsOf):
            self.arguments.append(key)
        try:
            fields = fields_of_node(node, annotation, parent=parent, root=self.root)
        except SignatureError as error:
            yield f"{key}._target_", f"{key}._target_={node['_target_']}: {error}"
            return
        for name, value in node.items():
            place = f"{key}.{name}".removeprefix(".")
            if name == "_target_":
                self.classes[str(value)] = place
                continue
            known = HYDRA.get(name) or fields.parameters.get(name)
            if known is None and fields.closed:
                self.unknown.append(place)
                others = () if fields.name else leaves(self.root)
                keys = [other for other, _ in others if other != place and "._" not in other]
                taken = {"_target_", *HYDRA, *fields.parameters}
                also = [one for one in node if one not in taken and one != name]
                yield (
                    place,
                    unknown_key(place, fields.parameters, owner=fields.name, keys=keys, also=also),
                )
            annotation = known.annotation if known else Any
            yield from self.problems(value, annotation, key=place, parent=node)


def _hint(annotation: Any, key: str) -> str:
    """Return the remedy for a plain value in place of a group."""
    groups = [signature_of(unwrapped(option)[0]) for option in options(annotation)]
    names = [name for group in groups for name in group.parameters]
    return f"; set {key}.{names[0]}=… instead" if names else ""


def needs_class(annotation: Any) -> bool:
    """Return whether a group of settings for this annotation has to name its class."""
    groups = [option for option in options(annotation) if problem(option, {}) is None]
    return bool(groups) and all(is_class(unwrapped(group)[0]) for group in groups)


def fields_of_node(node: _Node, annotation: Any, *, parent: _Node, root: _Node) -> Signature:
    """Return the keys of a node: arguments of its class, if it names one, and what its annotation describes.

    Args:
        node: Plain values.
        annotation: Its type.
        parent: The node that it is in.
        root: The whole configuration.

    Raises:
        SignatureError: There is no such class.
    """
    described = _described(annotation, node, parent=parent, root=root)
    target = node.get("_target_")
    if target is None:
        return replace(described, closed=described.closed and bool(described.parameters))
    own = fields_of_target(str(target))
    return replace(own, parameters={**own.parameters, **described.parameters})


def annotation_at(cfg: DictConfig, key: str) -> Any:
    """Return the type of a setting; `Any` where it is known only after an import.

    Args:
        cfg: The configuration.
        key: The setting's full name.
    """
    root = plain_values(cfg)
    node, parent, annotation = root, dict[str, Any](), Settings
    for name in key.split("."):
        annotation = _annotation_in(node, name, annotation, parent=parent, root=root)
        child = node.get(name)
        parent, node = node, child if isinstance(child, dict) else {}
    return annotation


def takes_any_key(cfg: DictConfig, key: str) -> bool:
    """Return whether a setting is in a mapping whose keys are the user's, such as `env.kwargs.variables`."""
    parts = key.split(".")
    above = (annotation_at(cfg, ".".join(parts[:count])) for count in range(1, len(parts)))
    return any(_is_open_mapping(option) for annotation in above for option in options(annotation))


def _annotation_in(node: _Node, name: str, annotation: Any, *, parent: _Node, root: _Node) -> Any:
    with suppress(SignatureError):  # reported at the setting that names the class
        fields = fields_of_node(node, annotation, parent=parent, root=root)
        found = HYDRA.get(name) or fields.parameters.get(name)
        return found.annotation if found else Any
    return Any


def _is_open_mapping(annotation: Any) -> bool:
    """Return whether an annotation, no union, is a mapping of values to names that nobody else gives."""
    base, metadata = unwrapped(annotation)
    described = any(isinstance(mark, Arguments | ArgumentsOf | Open) for mark in metadata)
    values = typing.get_args(base)[1:]
    built = any(is_class(unwrapped(one)[0]) for value in values for one in options(value))
    return (typing.get_origin(base) or base) in (dict, Mapping) and not described and not built


def fields_of_target(target: str) -> Signature:
    """Return the arguments of a class path.

    Raises:
        SignatureError: There is no such class.
    """
    package, _, rest = target.partition(".")
    # the cell of a notebook has no source to read
    if package == "__main__" and rest in vars(sys.modules["__main__"]):
        return UNKNOWN
    if not all(part.isidentifier() for part in target.split(".")):
        raise SignatureError("expected a class path such as package.module.Name")
    if not rest or find_spec(package) is None:
        install = f"install it (pip install {package}), or " if package in _NAMED_IN_DOCS else ""
        raise SignatureError(
            f"there is no package {package!r}; {install}give package.module.Class of one that is installed"
        )
    return read_signature(target)


def _described(annotation: Any, node: _Node, *, parent: _Node, root: _Node) -> Signature:
    """Return the keys of a node as its annotation describes them."""
    fields = UNKNOWN
    for option in options(annotation):
        base, metadata = unwrapped(option)
        if signature_of(base).parameters:
            fields = replace(signature_of(base), name="")
        elif typing.get_origin(base) in (dict, Mapping) and typing.get_args(base)[1] is not Any:
            items = dict.fromkeys(node, Parameter(typing.get_args(base)[1]))
            # the fields of another option say more
            fields = replace(fields, parameters={**items, **fields.parameters})
        for constraint in metadata:
            match constraint:
                case Arguments(target=target, without=without):
                    own = read_signature(target).parameters.items()
                    named = {name: p for name, p in own if p.by_name and name not in without}
                    fields = Signature(parameters={**named, **fields.parameters})
                case ArgumentsOf():
                    fields = _arguments_of(constraint, parent=parent, root=root)
                case Open():
                    fields = replace(fields, closed=False)
    return fields


def _arguments_in(annotation: Any) -> list[str]:
    """Return the classes that an annotation says have arguments or rules of a node."""
    return [mark.target for mark in instances(_marks(annotation), Arguments)]


def _marks(annotation: Any) -> list[Any]:
    """Return the metadata of an annotation, or of all members of a union."""
    return [mark for option in options(annotation) for mark in unwrapped(option)[1]]


def _arguments_of(constraint: ArgumentsOf, *, parent: _Node, root: _Node) -> Signature:
    named = parent.get(constraint.sibling) or OmegaConf.select(
        OmegaConf.create(dict(root)), constraint.default or "_"
    )
    path = class_path(str(named)) if named else None
    with suppress(SignatureError):  # reported at the setting that names the class
        return fields_of_target(path) if path else UNKNOWN
    return UNKNOWN


def class_path(target: str) -> str | None:
    """Return the class path of an environment, a gymnasium id's from the registry; None where it has none."""
    if "/" not in target:
        return target if "." in target else None
    from gymnasium import registry

    module, _, name = target.rpartition(":")
    with suppress(Exception):  # reported when the environment is made
        if module:
            import_module(module)
    entry_point = registry[name].entry_point if name in registry else None
    return entry_point.replace(":", ".") if isinstance(entry_point, str) else None


def _check_images(cfg: DictConfig) -> None:
    """Check that a model without images meets no environment with images."""
    target = OmegaConf.select(cfg, "model.build._target_")
    if not target or not OmegaConf.select(cfg, "env.visual"):
        return
    if TextOnly() in unwrapped(read_signature(str(target)).returns)[1]:
        raise ConfigError(
            "env.visual=true: the model takes no images; set model=small_vlm, or another environment"
        )


def keys_that_end(name: str, keys: Iterable[str]) -> list[str]:
    """Return the keys whose last name is, or ends with, a name; three at most, the shortest paths first.

    >>> keys_that_end("epochs", ["update.epochs", "trainer.max_epochs", "rollout.groups"])
    ['update.epochs', 'trainer.max_epochs']
    """
    found = [key for key in keys if f"_{key.rpartition('.')[2]}".endswith(f"_{name}")]
    return sorted(found, key=lambda key: key.count("."))[:3]


def unknown_key(
    key: str,
    siblings: Iterable[str] = (),
    *,
    owner: str = "",
    keys: Iterable[str] = (),
    also: Iterable[str] = (),
) -> str:
    """Return one line on a key that does not exist, with the nearest that does.

    Args:
        key: Its full name.
        siblings: Names in its node.
        owner: Class whose arguments these are.
        keys: Full names of settings, for a suggestion if the node has no similar name.
        also: Names in its node that do not exist either.
    """
    parent, _, name = key.rpartition(".")
    names = [sibling for sibling in siblings if not sibling.startswith("_")]
    message = f"unknown key {key}" + (f": {owner} takes no {name}" if owner else "")
    prefix = f"{parent}." if parent and not owner else ""
    near = did_you_mean(name, names).replace("mean ", f"mean {prefix}")
    if not near and not parent and (alike := keys_that_end(key, keys)):
        near = f"; did you mean {' or '.join(alike)}?"
    near = near or did_you_mean(key, keys)
    if near:
        return f"{message}{near}"
    if owner:
        removed = " ".join(f"'~{parent}.{one}'" for one in (name, *also))
        verb = "remove" if " " in removed else "removes"
        return (
            f"{message}; it takes {', '.join(names) or 'none'}; {removed} {verb} what a file sets"
        )
    if parent and names:
        return f"{message}; {parent} has {', '.join(sorted(names))}"
    return f"{message}; see --cfg job for all keys"
