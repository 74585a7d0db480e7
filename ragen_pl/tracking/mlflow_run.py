"""Tracking URI and tags of a run. Imports neither torch, lightning nor mlflow."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ragen_pl.base.files import atomic_write
from ragen_pl.base.foreign_files import is_inside, json_object
from ragen_pl.config.errors import ConfigError
from ragen_pl.config.nodes import leaves
from ragen_pl.config.own_files import is_signed, signed

RUN_FILE = "mlflow_run.json"
"""File in a run's folder with the id of its MLflow run."""

RUN_DIR = "run_dir"
"""Tag of an MLflow run: the folder of its run."""

UNTHINNED = ("val", "warm_start/", "collapse/")
"""Beginnings of metrics that are logged at all iterations: validations, steps of the warm start, alarms."""

_SQLITE = "sqlite:///"
# characters that a name may not have, and how many it may have
_OTHER_CHARACTERS = re.compile(r"[^\w/. -]")
_NAME_LENGTH = 250
_TIMEOUT_S = 3.0
_PACKAGES = ("ragen_pl", "torch", "lightning", "transformers", "mlflow")


class OtherRunError(ConfigError):
    """An MLflow run that a folder names is that of another folder."""


def tracking_uri(root: str | Path, *, uri: str | None = None) -> str:
    """Return where runs are tracked: `uri`, else MLFLOW_TRACKING_URI, else a sqlite file in `root`.

    A sqlite file has its absolute path: a run may be resumed from another folder.
    """
    chosen = uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root}/mlflow.db"
    file = chosen.removeprefix(_SQLITE)
    return chosen if file == chosen else f"{_SQLITE}{Path(file).expanduser().absolute()}"


def write_run_file(folder: Path, *, run_id: str, uri: str) -> None:
    """Write where a run is tracked into its folder, with this account's signature."""
    known = {"run_id": run_id, "tracking_uri": uri}
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / RUN_FILE, durable=True) as file:
        file.write_text(json.dumps(known | {"signature": signed(_signed_text(known))}))


def _signed_text(known: Mapping[str, str]) -> str:
    return json.dumps([known["run_id"], known["tracking_uri"]])


def known_run(folder: Path) -> dict[str, str]:
    """Return `run_id`, `tracking_uri` and `signature` of a run folder's MLflow run, empty if it has none.

    The signature is empty in files of other accounts and of earlier versions.

    Raises:
        ConfigError: Its file holds something else.
    """
    file = folder / RUN_FILE
    if not file.exists():
        return {}
    found = json_object(file) if is_inside(folder, file) else None
    match found:
        case {"run_id": str(run_id), "tracking_uri": str(uri), "signature": str(signature)}:
            return {"run_id": run_id, "tracking_uri": uri, "signature": signature}
        case {"run_id": str(run_id), "tracking_uri": str(uri)}:
            return {"run_id": run_id, "tracking_uri": uri, "signature": ""}
    raise ConfigError(f"{file}: expected run_id and tracking_uri of an MLflow run; remove the file")


def is_own_note(known: Mapping[str, str]) -> bool:
    """Return whether this account wrote where a run is tracked, see `known_run`."""
    return is_signed(_signed_text(known), known["signature"].encode("utf-8", "replace"))


def other_folder(known: Mapping[str, str], tags: Mapping[str, str], folder: Path) -> str | None:
    """Return, as a clause, that an MLflow run is not that of a folder; None where it is.

    A folder may be a copy, or somebody else's that names any run of a store: the run's own tag says which folder it
    belongs to. A folder of this account may have been moved.

    Args:
        known: Content of the folder's file, see `known_run`.
        tags: Tags of the MLflow run.
        folder: The folder.
    """
    own = tags.get(RUN_DIR, "")
    if own and os.path.realpath(own) == os.path.realpath(folder):
        return None
    if own and is_own_note(known) and not os.path.exists(own):
        return None
    whose = f"is that of the folder {own}" if own else "is that of no folder"
    return (
        f"the MLflow run {known['run_id']} {whose}, not of {folder}, so nothing is sent; set trust=true if it is the "
        f"same run, or remove {RUN_FILE} there"
    )


def may_name(known: Mapping[str, str], root: str | Path) -> bool:
    """Return whether a run's folder may name an address: this account wrote it there, or tracks there anyway.

    Args:
        known: Content of the run's file, see `known_run`.
        root: Folder of the runs.
    """
    return is_own_note(known) or known["tracking_uri"] == tracking_uri(root)


def check_address(folder: Path, root: str | Path) -> None:
    """Check that a folder that is continued names no address of somebody else.

    Args:
        folder: The run's folder.
        root: Folder of the runs.

    Raises:
        ConfigError: It does.
    """
    known = known_run(folder)
    if known and not may_name(known, root):
        raise ConfigError(
            f"{folder / RUN_FILE}: tracking_uri={known['tracking_uri']}: nothing shows that this account wrote the "
            "folder, so nothing is sent there; set +logger.uri=… or logger=none, or trust=true if you trust its author"
        )


def check_reachable(uri: str) -> None:
    """Check that a tracking server answers. MLflow itself would retry for minutes.

    Raises:
        ConfigError: No server answers at this address.
    """
    if not uri.startswith(("http://", "https://")):
        return
    try:
        urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        # a server answers; MLflow reports missing rights itself
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(
            f"MLflow at {uri} cannot be reached ({reason}); start the server, unset "
            "MLFLOW_TRACKING_URI for a local store, or set logger=none"
        ) from error


def version_tags(*, checkout: Path | None = None) -> dict[str, str]:
    """Return the versions of a run's libraries, and the git commit if the code is a checkout."""
    tags = {"version.python": platform.python_version()}
    for name in _PACKAGES:
        try:
            tags[f"version.{name}"] = version(name)
        except PackageNotFoundError:
            continue
    folder = checkout or Path(__file__).resolve().parent
    commit = _git(folder, "rev-parse", "HEAD")
    if commit:
        tags["git.commit"] = commit
        tags["git.changed"] = str(bool(_git(folder, "status", "--porcelain"))).lower()
    return tags


def flattened(settings: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Return nested settings as text under dotted names.

    >>> dict(flattened({"a": {"b": [1, 2]}, "c": None}))
    {'a.b': '[1, 2]', 'c': 'None'}
    """
    return ((name, str(value)) for name, value in leaves(settings, lists=False))


def accepted_name(name: str, *, instead: str = "") -> str:
    """Return a name of a metric or parameter as MLflow takes it; it refuses a request for one that it does not take.

    Args:
        name: The name. An environment or a user may have chosen a part of it.
        instead: What stands for characters that it may not have.

    >>> accepted_name("rollout/metrics/Länge (cm)"), accepted_name("rollout/metrics/%"), accepted_name("a//../b/")
    ('rollout/metrics/Länge cm', 'rollout/metrics', 'a/b')
    """
    parts = _OTHER_CHARACTERS.sub(instead, name)[:_NAME_LENGTH].split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..")) or "unnamed"


def _git(folder: Path, *arguments: str) -> str:
    command: Sequence[str] = ("git", "-C", str(folder), *arguments)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
