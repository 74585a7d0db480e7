"""The ranks' agreement that they are of one run, over the connection to the first one: `ragen_pl.ranks.same_run`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict

from ragen_pl.checkpoints.folder import Run
from ragen_pl.config.errors import ConfigError
from ragen_pl.ranks.rank_limits import Change
from ragen_pl.ranks.rank_watch import RankWatch
from ragen_pl.ranks.same_run import facts_of, token_file


def agree_with_others(
    watch: RankWatch,
    config: Mapping[str, str],
    run: Run,
    *,
    members: int,
    step: int = 1,
    store: Callable[[], int | None] = lambda: None,
    limit_s: float,
    folder_s: float,
) -> int | None:
    """Compare this rank's run with that of the others. All members must call it.

    Args:
        watch: This rank's connection.
        config: Digest of each value of the run's config by its key.
        run: The run as this rank has found it; its folder exists on the first rank.
        members: Number of ranks that compare.
        step: Distance of their numbers.
        store: Opens a store on the first rank, and returns its port; None if there is none.
        limit_s: `trainer.timeout_s`, within which all ranks have to come.
        folder_s: `trainer.shared_folder_s`, within which they have to see a file of the first one.

    Returns:
        The store's port.

    Raises:
        RankFailedError: They differ, or a rank is missing.
        ConfigError: The first rank is missing.
    """
    change = Change(0, "start of the ranks", limit_s, members * step, step)
    watch.send({"change": asdict(change)})
    answered_within_s = limit_s + folder_s
    try:
        with token_file(run.folder) if watch.rank == 0 else nullcontext() as made:
            if watch.rank == 0:
                watch.broadcast({"token": made, "store": store()})
            token = watch.receive("token", limit_s=answered_within_s)
            watch.send(
                {"facts": facts_of(config, run, token=token, within_s=folder_s), "count": members}
            )
            watch.receive("agreed", limit_s=answered_within_s)
        port: int | None = watch.receive("store", limit_s=answered_within_s)
    except TimeoutError as error:
        raise ConfigError(
            f"start of the ranks: {error}; start all ranks within trainer.timeout_s={limit_s:g}, on machines that can "
            "connect to the first one"
        ) from error
    return port
