"""Hydra's command line for a function, with each configuration error in one line.

The configuration, with each value of a sweep, is composed and checked before Hydra starts and before any job
begins. Hydra then works as usual.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import hydra
from hydra import compose
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig

from ragen_pl.base.constraints import did_you_mean
from ragen_pl.base.machine import end_without_collection
from ragen_pl.config.check import check_config
from ragen_pl.config.composition import compose_accepted, compose_overrides
from ragen_pl.config.ending import or_exit
from ragen_pl.config.environments import with_environments
from ragen_pl.config.errors import ConfigError
from ragen_pl.config.nodes import leaves
from ragen_pl.config.overrides import from_home, key_of, with_environment
from ragen_pl.config.paths import check_packages, config_dir
from ragen_pl.config.relations import ranks_asked_for, unread_overrides

log = logging.getLogger(__name__)

# loggers with a handler of their own: that of the root would print their messages once more
_OWN_HANDLERS = ("lightning", "huggingface_hub")

Task = Callable[[DictConfig], object]
Prepare = Callable[[argparse.Namespace], list[str]]


def hydra_main(
    config_name: str, *, prepare: Prepare | None = None
) -> Callable[[Task], Callable[[], None]]:
    """Return a decorator that makes a function of a config the command line's main function.

    A configuration that cannot be run ends the process with one line on stderr and code 2; with
    `debug=true` or HYDRA_FULL_ERROR=1 with a traceback instead. An unexpected error ends it with its
    traceback, then one line, and code 1.

    Args:
        config_name: The file in `config_dir()`, without `.yaml`.
        prepare: Function of the command line that runs before the composition and returns the overrides to use.
    """

    def decorate(task: Task) -> Callable[[], None]:
        @functools.wraps(task)
        def main() -> None:
            atexit.register(end_without_collection)
            _import_from_here()
            sys.argv[1:] = map(from_home, options_first(sys.argv[1:]))
            args = or_exit(lambda: parsed(sys.argv[1:], config_name=config_name))
            debug = wants_traceback(args.overrides)

            def before_hydra() -> None:
                name = args.config_name or config_name
                _replace_overrides(args, with_environment(args.overrides, command=name))
                if prepare is not None:
                    _replace_overrides(args, prepare(args))
                replaced = precheck(args, config_name=config_name, composed_only=debug)
                if replaced:
                    _replace_overrides(args, _accepted(args.overrides, replaced))

            @functools.wraps(task)
            def job(cfg: DictConfig) -> object:
                for name in _OWN_HANDLERS:
                    logging.getLogger(name).propagate = False
                cfg = with_environments(cfg, lambda overrides: compose("fit", overrides))
                # values that a sweeper draws are known here only
                if debug or args.multirun:
                    check_config(cfg)
                for message in unread_overrides(cfg, HydraConfig.get().overrides.task):
                    log.warning(message)
                return task(cfg)

            @functools.wraps(task)
            def job_or_exit(cfg: DictConfig) -> object:
                return or_exit(lambda: job(cfg))

            if debug:
                os.environ["HYDRA_FULL_ERROR"] = "1"
                before_hydra()
            else:
                or_exit(before_hydra)
            started = hydra.main(
                config_path=str(config_dir()), config_name=config_name, version_base="1.3"
            )
            started(job if debug else job_or_exit)()

        return main

    return decorate


def options_first(arguments: Sequence[str]) -> list[str]:
    """Return the command line with Hydra's options before the overrides, as its parser needs them.

    >>> options_first(["env=mine", "--config-dir", "conf", "seed=1"])
    ['--config-dir', 'conf', 'env=mine', 'seed=1']
    """
    overrides = [word for word in arguments if "=" in word and not word.startswith("-")]
    return [word for word in arguments if word not in overrides] + overrides


def parsed(arguments: Sequence[str], *, config_name: str) -> argparse.Namespace:
    """Return Hydra's options and the overrides of a command line.

    Args:
        arguments: The command line, without the program.
        config_name: As in `hydra_main`.

    Raises:
        ConfigError: There is no such option, or it lacks its value.
    """
    parser = get_args_parser()
    parser.exit_on_error = False
    try:
        args, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}; see --help") from error
    if unknown:
        name, _, value = unknown[0].partition("=")
        key = name.lstrip("-").replace("-", "_")
        options = [option for action in parser._actions for option in action.option_strings]
        folder = Path(args.config_path).resolve() if args.config_path else None
        try:
            cfg = compose_overrides(config_name, [], directory=args.config_dir, folder=folder)
        except ConfigError:
            # a command that begins with a run's settings, which are read later
            known = []
        else:
            known = [known for known, _ in leaves(cfg) if f".{known}".endswith(f".{key}")]
        option = "" if known else did_you_mean(name, options)
        setting = f"; settings have no dashes: {known[0] if known else key}={value or '…'}"
        raise ConfigError(f"{unknown[0]}: there is no such option{option or setting}")
    shown = [name for name in ("cfg", "info") if vars(args)[name] is not None]
    if args.multirun and shown:
        raise ConfigError(f"--{shown[0]} shows one configuration: leave out --multirun")
    return args


def _import_from_here() -> None:
    """Add the current folder to the path, as `python -m` does and console scripts do not.

    It comes last, so nothing in it replaces an installed package.
    """
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())


def wants_traceback(overrides: Sequence[str]) -> bool:
    """Return whether the user wants tracebacks."""
    return os.environ.get("HYDRA_FULL_ERROR") == "1" or "debug=true" in [
        override.lower() for override in overrides
    ]


def precheck(
    args: argparse.Namespace, *, config_name: str, composed_only: bool = False
) -> dict[str, str]:
    """Compose and check the configuration of the command line.

    Args:
        args: Hydra's parsed command line.
        config_name: The file in `config_dir()`, without `.yaml`.
        composed_only: Whether nothing else is checked.

    Returns:
        Overrides that Hydra takes in place of some of those given.

    Raises:
        ConfigError: With the first problem.
    """
    replaced: dict[str, str] = {}
    if not composed_only:
        check_packages()
    if args.help or args.hydra_help or args.info or args.shell_completion:
        return replaced
    for overrides in combinations(args.overrides) if args.multirun else [args.overrides]:
        cfg, others = compose_accepted(
            args.config_name or config_name,
            overrides,
            directory=args.config_dir,
            folder=Path(args.config_path).resolve() if args.config_path else None,
        )
        replaced |= others
        if composed_only:
            continue
        if args.cfg is None:
            check_config(cfg)
        if args.multirun and ranks_asked_for(cfg) > 1:
            raise ConfigError(
                f"--multirun with {ranks_asked_for(cfg)} ranks: the runs of a sweep share a process, and each would "
                "start ranks that sweep again; start the runs one by one"
            )
    return replaced


def _accepted(overrides: Sequence[str], replaced: Mapping[str, str]) -> list[str]:
    """Return the command line's overrides with those that Hydra takes; one of a sweep has all its values."""
    added = {key_of(line) for line, other in replaced.items() if other.startswith("++")}
    return [
        replaced.get(line, f"++{line}" if key_of(line) in added else line) for line in overrides
    ]


def combinations(overrides: Sequence[str]) -> list[list[str]]:
    """Return override lists in which every value of every sweep occurs at least once.

    >>> combinations(["a=1,2,3", "b=x,y"])
    [['a=1', 'b=x'], ['a=2', 'b=y'], ['a=3', 'b=x']]
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        from ragen_pl.config.hydra_errors import translated

        raise ConfigError(translated(error)) from error
    values: list[list[str]] = []
    for override in parsed:
        if not override.is_sweep_override():
            values.append([str(override.input_line)])
            continue
        with suppress(HydraException, ValueError):  # an interval, for sweepers that sample from it
            key = override.get_key_element()
            values.append([f"{key}={value}" for value in override.sweep_string_iterator()])
    count = max(map(len, values), default=1)
    return [[options[index % len(options)] for options in values] for index in range(count)]


def _replace_overrides(args: argparse.Namespace, overrides: list[str]) -> None:
    """Replace the overrides of the command line, also in `sys.argv`, which Hydra reads again."""
    options = [word for word in sys.argv[1:] if word not in args.overrides]
    sys.argv[1:] = [*overrides, *options]
    args.overrides = overrides
