"""`python -m ragen_pl.doctor`: what this machine can do, and what to install for the rest.

It looks and changes nothing. `--json` prints the same for a bug report. It ends with code 0 where the main
job can run. torch is imported only to ask for GPUs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from ragen_pl.config.errors import ConfigError, in_one_line
from ragen_pl.config.paths import check_packages, config_dir
from ragen_pl.run.tracking import check_reachable, tracking_uri

_OPTIONAL = {
    "peft": ("LoRA", "pip install 'ragen_pl[lora]'"),
    "deepspeed": ("trainer.strategy=deepspeed", "pip install deepspeed"),
    "pygame": ("gymnasium's own FrozenLake images, in benchmarks", "pip install pygame"),
}
_MEMORY_GB = 3.0  # that the main job takes, with room
_DISK_GB = 1.0
_BYTES_A_PARAMETER = 4 * 5  # weights, gradient, Adam's two moments and the reference, in float32


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    name: str
    found: str
    ok: bool = True
    needed: bool = False  # whether the main job needs it
    hint: str = ""


def examine(*, root: str = "runs") -> list[Finding]:
    """Look at the machine and the installation; `root` is where runs would be written."""
    return [
        *_installation(),
        *_machine(),
        *_folder(Path(root)),
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
    except PackageNotFoundError:  # a checkout on PYTHONPATH
        lines = ["torch", "lightning", "transformers", "timm", "gymnasium", "hydra-core", "mlflow"]
    plain = [line for line in lines if "extra ==" not in line]
    names = [
        "".join(letter if letter.isalnum() or letter in "-_." else " " for letter in line)
        for line in plain
    ]
    return sorted(name.split()[0] for name in names)


def _machine() -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("processor", f"{usable} cores, {platform.machine()}, {platform.system()}")
    memory = _free_memory_gb()
    if memory is None:
        yield Finding("memory", "unknown on this system")
    else:
        enough = memory >= _MEMORY_GB
        hint = "close programs, or make it smaller: rollout.groups=32 warm_start.episodes=1024"
        yield Finding("memory", f"{memory:.1f} GB free", enough, True, "" if enough else hint)
    gpus = _gpus()
    yield Finding("GPU", ", ".join(f"{name} {gb:.0f} GB" for name, gb in gpus) or "none")
    room = max([gb for _, gb in gpus], default=memory or 0.0)
    millions = 0.6 * room * 1e9 / _BYTES_A_PARAMETER / 1e6  # the rest is for activations
    where = "a GPU" if gpus else "the processor"
    yield Finding("model size", f"about {millions:,.0f} M parameters trained in float32 on {where}")


def _free_memory_gb() -> float | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    limits = [free * 1024.0]
    for file, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),  # of a container
    ):
        try:
            limits.append(float(Path(file).read_text()) - float(Path(used).read_text()))
        except (OSError, ValueError):
            continue
    return min(limits) / 1e9


def _gpus() -> list[tuple[str, float]]:
    try:
        import torch
    except Exception:  # told as a missing package
        return []
    if not torch.cuda.is_available():
        return []
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [(one.name, one.total_memory / 1e9) for one in found]


def _folder(root: Path) -> Iterator[Finding]:
    root = root.absolute()
    place = next(path for path in (root, *root.parents) if path.exists())
    writable = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    hint = "" if writable else "set paths.root to a folder of yours"
    yield Finding("runs", str(root), writable, True, hint)
    free = shutil.disk_usage(place).free / 1e9
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
        if importlib.util.find_spec(name) is None:
            yield Finding(name, f"not installed; for {use}", ok=False, hint=hint)
        else:
            yield Finding(name, version(name))


def main() -> None:
    """Print the findings; end with code 1 where the main job cannot run."""
    parser = argparse.ArgumentParser(prog="python -m ragen_pl.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print for a bug report")
    parser.add_argument("--root", default="runs", help="paths.root of the runs to come")
    arguments = parser.parse_args()
    findings = examine(root=arguments.root)
    lacking = [one for one in findings if one.needed and not one.ok]
    if arguments.json:
        print(json.dumps({one.name: asdict(one) for one in findings}, indent=1))
    else:
        for one in findings:
            sign = "ok" if one.ok else "!!" if one.needed else "--"
            print(
                f"{sign} {one.name:<14} {one.found}"
                + (f"   ({one.hint})" if one.hint and not one.ok else "")
            )
        names = ", ".join(one.name for one in lacking)
        print(
            f"\nThe main job cannot run: {names}."
            if lacking
            else "\nThe main job can run: make fit"
        )
    raise SystemExit(1 if lacking else 0)


if __name__ == "__main__":
    main()
