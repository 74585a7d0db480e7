"""Class paths in a configuration, checked by reading source files: importing them would load torch.

Of this project's own classes the name and the arguments are checked, of others that their package is there.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig

_OURS = frozenset({"ragen_pl", "envs", "visual_envs"})


def target_problems(cfg: DictConfig | ListConfig, *, prefix: str = "") -> Iterator[str]:
    """Yield one line for each class path that leads nowhere and each argument its class does not take."""
    names: Iterable[Any] = cfg.keys() if isinstance(cfg, DictConfig) else range(len(cfg))
    for name in names:
        node = cfg[name]
        if not isinstance(node, DictConfig | ListConfig):
            continue
        key = f"{prefix}{name}"
        if isinstance(node, DictConfig) and isinstance(node.get("_target_"), str):
            yield from _problems(node, key=key)
        yield from target_problems(node, prefix=f"{key}.")


def _problems(node: DictConfig, *, key: str) -> Iterator[str]:
    target = str(node["_target_"])
    package, _, rest = target.partition(".")
    said = f"{key}._target_={target}"
    if not rest or find_spec(package) is None:
        yield f"{said}: there is no package {package!r}; install it, or give package.module.Class"
    elif package in _OURS:
        found = _definition(target)
        if isinstance(found, str):
            yield f"{said}: {found}"
        elif found is not None:
            allowed = _arguments(found)
            if allowed is None:
                return
            for name in map(str, node):
                if name not in allowed and not name.startswith("_"):
                    yield _unknown_argument(f"{key}.{name}", found.name, name, allowed)


def _unknown_argument(key: str, target: str, name: str, allowed: list[str]) -> str:
    close = get_close_matches(name, allowed, n=1)
    hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(allowed) or 'none'}"
    return f"unknown key {key}: {target} takes no {name}; {hint}"


@functools.cache
def _definition(target: str) -> ast.ClassDef | ast.FunctionDef | str | None:
    """Return a target's definition, None where only importing could tell, or what is wrong."""
    parts = target.split(".")
    spec = find_spec(parts[0])
    folder = Path(str(((spec and spec.submodule_search_locations) or [""])[0]))
    file = folder / "__init__.py"
    used = 1
    for used in range(1, len(parts)):
        if (folder / parts[used]).is_dir():
            folder = folder / parts[used]
            file = folder / "__init__.py"
        elif (folder / f"{parts[used]}.py").is_file():
            file, used = folder / f"{parts[used]}.py", used + 1
            break
        else:
            break
    names = parts[used:]
    if len(names) != 1:
        return (
            f"there is no module {'.'.join(parts[:-1])}"
            if names
            else "expected a class, found a module"
        )
    return _in_module(
        ast.parse(file.read_text(encoding="utf-8")), names[0], module=".".join(parts[:-1])
    )


def _in_module(
    tree: ast.Module, name: str, *, module: str
) -> ast.ClassDef | ast.FunctionDef | str | None:
    public: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            if node.name == name:
                return node
            public.append(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            if name in [alias.asname or alias.name for alias in node.names]:
                return None
        elif isinstance(node, ast.Assign) and name in [ast.unparse(one) for one in node.targets]:
            return None
    close = get_close_matches(name, [one for one in public if not one.startswith("_")], n=1)
    return f"{module} has no {name}" + (f"; did you mean {close[0]}?" if close else "")


def _arguments(node: ast.ClassDef | ast.FunctionDef) -> list[str] | None:
    """Return the names that a call takes, None where inheritance or `**` leaves them open."""
    if isinstance(node, ast.FunctionDef):
        return _parameters(node)
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            names = _parameters(item)
            return None if names is None else names[1:]
    if any("dataclass" in ast.unparse(mark) for mark in node.decorator_list) and not node.bases:
        return [
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and "ClassVar" not in ast.unparse(item.annotation)
        ]
    return None if node.bases else []


def _parameters(node: ast.FunctionDef) -> list[str] | None:
    if node.args.kwarg is not None:
        return None
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [argument.arg for argument in given]
