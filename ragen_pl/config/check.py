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

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ragen_pl.config.errors import ConfigError
from ragen_pl.config.relations import relation_problems
from ragen_pl.config.signatures import (
    UNKNOWN,
    Signature,
    SignatureError,
    class_in_source,
    is_class,
    read_signature,
    signature_of,
)
from ragen_pl.constraints import (
    Arguments,
    ArgumentsOf,
    Built,
    DivisorOf,
    Open,
    Rules,
    TextOnly,
    did_you_mean,
    options,
    problem,
    shown,
    takes_group,
    unwrapped,
)

Settings = class_in_source("ragen_pl.config.schema.Settings")
_HYDRA = {
    "_partial_": bool,
    "_recursive_": bool,
    "_convert_": Literal["none", "partial", "object", "all"],
}


def check_config(cfg: DictConfig) -> None:
    """Check a configuration for unknown keys, missing values and invalid values.

    Raises:
        ConfigError: with one line that names the key, the value and what was expected.
    """
    check_values_exist(cfg)
    problems = list(_problems(cfg, Settings, key="", root=cfg))
    # a wrong value is reported at its own key, not at a key that refers to it
    problems.sort(key=lambda item: _refers(cfg, item[0]))
    for _, message in problems:
        raise ConfigError(message)
    for message in relation_problems(cfg, _classes(cfg)):
        raise ConfigError(message)
    _check_images(cfg)


def check_values_exist(cfg: DictConfig) -> None:
    """Read every value once.

    Raises:
        ConfigError: a value is missing (`???`) or refers to one that does not exist.
    """
    for _ in leaves(cfg):
        pass


def leaves(cfg: DictConfig | ListConfig, *, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the full name and value of every setting; items of a list are named by their index.

    Raises:
        ConfigError: a value is missing (`???`) or refers to one that does not exist.
    """
    names: Iterable[Any] = list(cfg.keys()) if isinstance(cfg, DictConfig) else range(len(cfg))
    for name in names:
        key = f"{prefix}{name}"
        if OmegaConf.is_missing(cfg, name):
            raise ConfigError(f"{key} has no value; set {key}=…")
        try:
            value = cfg[name]
        except OmegaConfBaseException as error:
            raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from error
        if isinstance(value, DictConfig | ListConfig) and len(value):
            yield from leaves(value, prefix=f"{key}.")
        elif isinstance(value, DictConfig | ListConfig):
            yield key, {} if isinstance(value, DictConfig) else []
        else:
            yield key, value


def _classes(cfg: DictConfig) -> dict[str, str]:
    """Return the paths of the classes that the schema and a configuration name, each with what names it."""
    named = {str(value): key for key, value in leaves(cfg) if key.endswith("._target_")}
    return dict.fromkeys(_classes_in(Settings), "ragen_pl.config.schema") | named


def _classes_in(annotation: Any) -> Iterator[str]:
    for option in options(annotation):
        base, metadata = unwrapped(option)
        yield from (item.target for item in metadata if isinstance(item, Arguments | Rules))
        for field in () if is_class(base) else signature_of(base).parameters.values():
            yield from _classes_in(field)


def _refers(cfg: DictConfig, key: str) -> bool:
    """Return whether a setting, or a node that it is in, refers to another one."""
    node: Any = cfg
    for name in key.split("."):
        if isinstance(node, DictConfig) and OmegaConf.is_interpolation(node, name):
            return True
        node = OmegaConf.select(node, name) if isinstance(node, DictConfig) else None
    return False


def _problems(
    value: Any, annotation: Any, *, key: str, root: DictConfig
) -> Iterator[tuple[str, str]]:
    """Yield the key and one line for each wrong setting in a node or leaf."""
    if isinstance(value, DictConfig):
        if not _takes_group(annotation):
            yield key, f"{key}: found a group of settings, {problem(annotation, {})}"
        else:
            yield from _problems_of_group(value, annotation, key=key, root=root)
    elif isinstance(value, ListConfig):
        yield from _problems_of_list(value, annotation, key=key, root=root)
    elif (expected := problem(annotation, value)) is not None:
        yield key, f"{key}={shown(value)}: {expected}{_hint(annotation, key)}"


def _takes_group(annotation: Any) -> bool:
    return any(
        takes_group(option) or signature_of(unwrapped(option)[0]).parameters
        for option in options(annotation)
    )


def _hint(annotation: Any, key: str) -> str:
    """Return the remedy for a plain value in place of a group."""
    groups = [signature_of(unwrapped(option)[0]) for option in options(annotation)]
    names = [name for group in groups for name in group.parameters]
    return f"; set {key}.{names[0]}=… instead" if names else ""


def _problems_of_list(
    value: ListConfig, annotation: Any, *, key: str, root: DictConfig
) -> Iterator[tuple[str, str]]:
    lists = [option for option in options(annotation) if problem(option, []) is None]
    if not lists:
        yield key, f"{key}={shown(value)}: {problem(annotation, list(value))}"
        return
    item = (*typing.get_args(lists[0]), Any)[0]
    for index, member in enumerate(value):
        yield from _problems(member, item, key=f"{key}.{index}", root=root)


def _problems_of_group(
    node: DictConfig, annotation: Any, *, key: str, root: DictConfig
) -> Iterator[tuple[str, str]]:
    # an empty group is none, such as logger=none
    if len(node) and "_target_" not in node and needs_class(annotation):
        yield (
            key,
            (
                f"{key}={shown(node)}: found a group without _target_, which names the class to build; set "
                f"{key}._target_=package.module.Class"
            ),
        )
        return
    try:
        fields = fields_of_node(node, annotation, root=root)
    except SignatureError as error:
        yield f"{key}._target_", f"{key}._target_={node._target_}: {error}"
        return
    known = fields.parameters
    values = {str(name): node[name] for name in node}
    for name, value in values.items():
        place = f"{key}.{name}".removeprefix(".")
        if name == "_target_":
            continue
        child = _HYDRA.get(name) or known.get(name)
        if child is None:
            if fields.closed:
                yield place, unknown_key(place, known, owner=fields.name)
            child = Any
        yield from _problems(value, child, key=place, root=root)
        for constraint in unwrapped(child)[1]:
            if not isinstance(constraint, DivisorOf):
                continue
            expected = constraint.problem(value, values)
            if expected is not None:
                named = expected.replace(constraint.name, f"{key}.{constraint.name}")
                yield place, f"{place}={shown(value)}: {named}"


def fields_of_node(node: DictConfig, annotation: Any, *, root: DictConfig) -> Signature:
    """Return the keys of a node: arguments of its class, if it names one, and what its annotation describes.

    Raises:
        SignatureError: there is no such class.
    """
    described = _described(annotation, node, root=root)
    target = node.get("_target_")
    if target is None:
        return replace(described, closed=described.closed and bool(described.parameters))
    own = fields_of_target(str(target))
    return replace(
        own,
        parameters=own.parameters | described.parameters,
        descriptions=own.descriptions | described.descriptions,
    )


def needs_class(annotation: Any) -> bool:
    """Return whether a group of settings for this annotation has to name its class."""
    groups = [unwrapped(option) for option in options(annotation) if takes_group(option)]
    return bool(groups) and all(is_class(base) or Built() in metadata for base, metadata in groups)


def fields_of_target(target: str) -> Signature:
    """Return the arguments of a class path.

    Raises:
        SignatureError: there is no such class.
    """
    package, _, rest = target.partition(".")
    # the cell of a notebook has no source to read
    if package == "__main__" and rest in vars(sys.modules["__main__"]):
        return UNKNOWN
    if not all(part.isidentifier() for part in target.split(".")):
        raise SignatureError("expected a class path such as package.module.Name")
    if not rest or find_spec(package) is None:
        raise SignatureError(
            f"there is no package {package!r}; install it (pip install {package}), or give package.module.Class"
        )
    return read_signature(target)


def _described(
    annotation: Any, node: DictConfig | Mapping[str, Any], *, root: DictConfig
) -> Signature:
    """Return the keys of a node as its annotation describes them."""
    fields = UNKNOWN
    for option in options(annotation):
        base, metadata = unwrapped(option)
        if signature_of(base).parameters:
            fields = replace(signature_of(base), name="")
        elif typing.get_origin(base) in (dict, Mapping):
            item = typing.get_args(base)[1]
            # the fields of another option say more
            described = {str(name): item for name in node if item is not Any}
            fields = replace(fields, parameters=described | fields.parameters)
        for constraint in metadata:
            if isinstance(constraint, Arguments):
                own = read_signature(constraint.target)
                known = {name: own.parameters[name] for name in own.keywords} | fields.parameters
                descriptions = own.descriptions | fields.descriptions
                fields = Signature(parameters=known, descriptions=descriptions)
            elif isinstance(constraint, ArgumentsOf):
                fields = _arguments_of(constraint, node, root=root)
            elif isinstance(constraint, Open):
                fields = replace(fields, closed=False)
    return fields


def _arguments_of(constraint: ArgumentsOf, node: Any, *, root: DictConfig) -> Signature:
    parent = node._get_parent() if isinstance(node, DictConfig) else None
    sibling = parent.get(constraint.sibling) if isinstance(parent, DictConfig) else None
    target = sibling or OmegaConf.select(root, constraint.default or "_")
    path = class_path(str(target)) if target else None
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


def unknown_key(
    key: str, siblings: Iterable[str] = (), *, owner: str = "", keys: Iterable[str] = ()
) -> str:
    """Return one line on a key that does not exist, with the nearest that does.

    Args:
        key: its full name.
        siblings: names in its node.
        owner: class whose arguments these are.
        keys: full names of settings, for a suggestion if the node has no similar name.
    """
    parent, _, name = key.rpartition(".")
    names = [sibling for sibling in siblings if not sibling.startswith("_")]
    message = f"unknown key {key}" + (f": {owner} takes no {name}" if owner else "")
    prefix = f"{parent}." if parent and not owner else ""
    near = did_you_mean(name, names).replace("mean ", f"mean {prefix}") or did_you_mean(key, keys)
    if near:
        return f"{message}{near}"
    if owner:
        return f"{message}; it takes {', '.join(names) or 'none'}"
    if parent and names:
        return f"{message}; {parent} has {', '.join(sorted(names))}"
    return f"{message}; see --cfg job for all keys"


def fields_at(key: str) -> Signature:
    """Return the keys of a node in the schema, without those of its class."""
    annotation: Any = Settings
    empty = OmegaConf.create({})
    for name in key.split(".") if key else ():
        fields = _described(annotation, {name: None}, root=empty)
        if name not in fields.parameters:
            return UNKNOWN
        annotation = fields.parameters[name]
    return _described(annotation, {}, root=empty)
