"""Commands that are called in the process of a test."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import pytest
from hydra.core.global_hydra import GlobalHydra


@dataclass
class Result:
    """How a command ended and what it printed."""

    code: object
    stderr: str
    stdout: str

    def refused(self) -> str:
        """Return the one line of a refusal."""
        assert self.code == 2, (self.code, self.stderr)
        assert "Traceback" not in self.stderr
        # transformers draws a bar while it loads weights
        lines = [line for line in self.stderr.splitlines() if "Loading weights" not in line]
        lines = [line for line in lines if line]
        assert len(lines) == 1 and lines[0].startswith("ragen_pl: "), self.stderr
        return lines[0].removeprefix("ragen_pl: ")


def caller(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    """Return `python -m ragen_pl.NAME` as a function of its name and arguments."""

    def call(name: str, *arguments: str) -> Result:
        main = import_module(f"ragen_pl.{name}").main
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        capsys.readouterr()
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        environment = dict(os.environ)
        code: object = 0
        try:
            main()
        except SystemExit as error:
            code = error.code
        finally:
            GlobalHydra.instance().clear()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.environ.clear()
            os.environ.update(environment)
        printed = capsys.readouterr()
        return Result(code, printed.err, printed.out)

    return call
