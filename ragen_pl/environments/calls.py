"""Calls of an environment before a run: each has a time limit, and an error of one line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import gymnasium
from gymnasium.error import Error
from omegaconf import DictConfig

from ragen_pl.base.error_text import error_text
from ragen_pl.config.environments import is_mixture
from ragen_pl.config.errors import ConfigError, in_one_line
from ragen_pl.config.nodes import plain
from ragen_pl.environments.classes import environment_maker
from ragen_pl.environments.manager import CREATION_FACTOR, EnvironmentManager
from ragen_pl.environments.workers import EnvironmentWorkers, TimeLimitExceeded

T = TypeVar("T")


def manager_settings(env: DictConfig) -> dict[str, Any]:
    """Return the arguments of the environment manager in the node `env`, whose other keys are not for it.

    Raises:
        ConfigError: It is a mixture, or limits the memory of a process that there is not.
    """
    if is_mixture(env):
        raise ConfigError(
            f"env={env.get('name')}: is a mixture of {', '.join(env.environments)}, and this command plays one "
            f"environment; set env={next(iter(env.environments))}"
        )
    if env.get("memory_mb") is not None and not env.get("process"):
        raise ConfigError(
            f"env.memory_mb={env.memory_mb}: limits the process of an environment; set env.process=true"
        )
    known = inspect.signature(EnvironmentManager).parameters
    return {key: value for key, value in plain(env).items() if key in known}


def make_environment(env: DictConfig) -> gymnasium.Env[Any, Any]:
    """Make an environment from the node `env` of a config.

    Raises:
        ConfigError: It does not exist or does not take its settings.
    """
    return EnvironmentCalls(env).make()


def check_made(env: DictConfig) -> None:
    """Make an environment from the node `env` of a config and close it.

    Raises:
        ConfigError: It does not exist or does not take its settings.
    """
    calls = EnvironmentCalls(env)
    calls.make()
    calls.close()


class EnvironmentCalls:
    """Call an environment as a run does: in a thread of its own, with the time limits of a run.

    Args:
        env: Node `env` of a config.
    """

    def __init__(self, env: DictConfig) -> None:
        manager_settings(env)
        self.place = f"env.target={env.target}"
        self._env = env
        self._timeout_s: float | None = env.get("timeout_s")
        self._workers: EnvironmentWorkers[Any] = EnvironmentWorkers(1, timeout_s=self._timeout_s)
        self._made: gymnasium.Env[Any, Any] | None = None

    def call(self, what: str, function: Callable[[], T]) -> T:
        """Return the result of a call of the environment.

        Args:
            what: The call, for messages; empty for one that names itself.
            function: Makes the call.

        Raises:
            ConfigError: It raised, ended the program or took too long.
        """
        try:
            return self.attempt(what, function)
        except ConfigError:
            raise
        except Exception as error:  # an environment may raise anything
            text = in_one_line(error)
            # the border names the environment, which the place has named
            text = f"{what} raised: {text}" if what else text.removeprefix(f"{self._env.target} ")
            raise ConfigError(f"{self.place}: {text}") from error

    def attempt(self, what: str, function: Callable[[], T], *, time_limit_factor: float = 1.0) -> T:
        """Return the result of a call of the environment, or raise its own error.

        Args:
            what: As that of `call`.
            function: Makes the call.
            time_limit_factor: Factor of the time limit.

        Raises:
            ConfigError: It ended the program or took too long.
            Exception: Its own error.
        """
        (outcome,) = self._workers.run([(0, function)], time_limit_factor=time_limit_factor)
        named = f"{what}: " if what else ""
        if isinstance(outcome, TimeLimitExceeded):
            self._kill()
            raise ConfigError(
                f"{self.place}: {named}{outcome}; find out what it waits for, or raise env.timeout_s="
                f"{self._timeout_s:g}"
            ) from outcome
        if isinstance(outcome, SystemExit):
            raise ConfigError(
                f"{self.place}: {named}its code ended the program (SystemExit: {outcome.code}); let it raise an error "
                "that names the cause"
            ) from outcome
        if isinstance(outcome, BaseException):
            raise outcome
        result: T = outcome
        return result

    def make(self) -> gymnasium.Env[Any, Any]:
        """Make the environment.

        Raises:
            ConfigError: It does not exist or does not take its settings.
        """
        env, target = self._env, str(self._env.target)
        process, memory_mb = bool(env.get("process")), env.get("memory_mb")
        find = partial(environment_maker, target, process=process, memory_mb=memory_mb)
        kwargs = plain(env.get("kwargs"))
        try:
            make = self.attempt("its module", find, time_limit_factor=CREATION_FACTOR)
            made = self.attempt(
                "its constructor", partial(make, **kwargs), time_limit_factor=CREATION_FACTOR
            )
        except ConfigError:
            raise
        except Exception as error:  # an environment's constructor may raise anything
            raise ConfigError(_refusal(error, target=target)) from error
        self._made = made
        return made

    def close(self) -> None:
        """Close the environment; one that hangs or raises there is left alone."""
        env, self._made = self._made, None
        if env is not None:
            with suppress(Exception):
                self.attempt("close()", env.close)

    def _kill(self) -> None:
        """Give up an environment that hangs; its process can be ended."""
        from ragen_pl.environments.process import ProcessEnvironment

        env, self._made = self._made, None
        if isinstance(env, ProcessEnvironment):
            env.kill()


def _refusal(error: Exception, *, target: str) -> str:
    """Return one line on an environment that cannot be made."""
    place, text = f"env.target={target}", in_one_line(error)
    if (package := _missing_package(error, target=target)) is not None:
        return f"{place}: it needs the package {package!r}, which is not installed; install it with pip"
    # the name of the environment is wrong
    if isinstance(error, Error | ModuleNotFoundError):
        return (
            f"{place}: {text}; give a gymnasium id such as ragen_pl.envs:ragen/FrozenLake-v0, or a class path such as "
            "my_package.my_module.MyEnv"
        )
    if text.startswith(f"{place}: "):
        return text
    # an adapter names the extra that installs its library
    if isinstance(error, ImportError):
        return f"{place}: {text}"
    cause = error_text(error).split(" was raised from the environment creator")[0]
    return f"env.kwargs of {target}: {' '.join(cause.split()) or type(error).__name__}"


def _missing_package(error: BaseException | None, *, target: str) -> str | None:
    """Return the package that an import in the environment's code misses, None where its own module is missing."""
    own = target.partition(":")[0] if "/" in target else target.rpartition(".")[0]
    while error is not None:
        if type(error) is ImportError:
            return None
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            is_own = f"{own}.".startswith(f"{error.name}.")
            return None if is_own else error.name.partition(".")[0]
        error = error.__cause__
    return None
