"""Comparison of ranks that have to be of one run: same folder, config, versions and checkpoint. No torch is imported.

token file of the first rank -> seen by each rank? -> facts of all ranks, compared by the first one -> one line
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

import ragen_pl
from ragen_pl.checkpoints.folder import Run
from ragen_pl.checkpoints.starts import beginning_of, digest
from ragen_pl.config.nodes import leaves

_PACKAGES = ("torch", "lightning", "transformers")
# seconds between two looks for the token file
_LOOK_S = 0.2
# keys that a line names
_NAMED = 3
_TOKEN = "start_{}.token"


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """Facts that a rank finds at its start.

    Attributes:
        folder: The run's folder.
        sees_folder: Whether the first rank's token file is in it.
        begins: The place that the run continues from, as `beginning_of` says it.
        config: Digest of each value of the config by its key.
        versions: Versions of ragen_pl and of what it builds on.
    """

    folder: str
    sees_folder: bool
    begins: str
    config: Mapping[str, str]
    versions: Mapping[str, str]


def facts_of(config: Mapping[str, str], run: Run, *, token: str, within_s: float) -> dict[str, Any]:
    """Return a rank's `RankFacts` as JSON takes them, once the first rank has written its token file.

    Args:
        config: Digest of each value of the run's config by its key.
        run: The run as this rank has found it.
        token: The token of the file.
        within_s: Seconds to wait for the file, which a network file system may show late.
    """
    return asdict(
        RankFacts(
            folder=str(run.folder),
            sees_folder=_appears(run.folder / _TOKEN.format(token), within_s=within_s),
            begins=beginning_of(run),
            config=dict(config),
            versions=_versions(),
        )
    )


@contextmanager
def token_file(folder: Path) -> Iterator[str]:
    """Keep a file in a folder in the block, and give the token that names it.

    Args:
        folder: A folder that exists.
    """
    token = secrets.token_hex(8)
    file = folder / _TOKEN.format(token)
    file.touch()
    try:
        yield token
    finally:
        with suppress(OSError):
            file.unlink()


def config_digests(cfg: DictConfig) -> dict[str, str]:
    """Return the digest of each value of a config by its key."""
    return {key: digest(str(value)) for key, value in leaves(cfg)}


def differences(facts: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> str | None:
    """Return one line that says in what ranks differ from the first one, and where they run; None if in nothing.

    Args:
        facts: `RankFacts` of each rank.
        hosts: Name of each rank's machine.
    """
    ranks = {rank: RankFacts(**given) for rank, given in sorted(facts.items())}
    first, here = ranks[0], hosts[0]

    def where(others: Sequence[int]) -> str:
        return _places(others, hosts)

    if blind := [rank for rank, own in ranks.items() if not own.sees_folder]:
        return (
            f"paths.run_dir={first.folder}: not the same folder on {where(blind)} as on {here}; put it on a file "
            "system that all machines share"
        )
    for name, found in first.versions.items():
        if others := [rank for rank, own in ranks.items() if own.versions.get(name) != found]:
            other = ranks[others[0]].versions.get(name)
            return f"{name} is {found} on {here} and {other} on {where(others)}; install the same one on all machines"
    if others := [rank for rank, own in ranks.items() if own.config != first.config]:
        keys = sorted(_differing(first.config, ranks[others[0]].config))
        named = ", ".join(keys[:_NAMED]) + (" and others" if len(keys) > _NAMED else "")
        return f"{named}: not the same on {where(others)} as on {here}; start all ranks by the same command"
    if others := [rank for rank, own in ranks.items() if own.begins != first.begins]:
        return (
            f"paths.run_dir={first.folder}: the run continues from {first.begins} on {here}, and from "
            f"{ranks[others[0]].begins} on {where(others)}; their view of the folder is not the same, start them again"
        )
    return None


def _differing(first: Mapping[str, str], second: Mapping[str, str]) -> set[str]:
    return {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)}


def _places(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Return the names of the ranks' machines, with the ranks' numbers where others on the machine are not meant."""
    named = []
    for host in dict.fromkeys(hosts[rank] for rank in ranks):
        own = [rank for rank in ranks if hosts[rank] == host]
        whole = [rank for rank in hosts if hosts[rank] == host] == own
        named.append(host if whole else f"{host} (rank {', '.join(map(str, own))})")
    return ", ".join(named)


def _appears(file: Path, *, within_s: float) -> bool:
    end = time.monotonic() + within_s
    while not file.exists():
        # a network file system lists a folder anew when something in it is asked for
        with suppress(OSError):
            list(file.parent.iterdir())
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK_S)
    return True


def _versions() -> dict[str, str]:
    found = {"ragen_pl": ragen_pl.__version__}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
