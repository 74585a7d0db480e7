"""How the processes of a run find each other, and end together: `ragen_pl.ranks.rank_watch`.

torchrun, srun, by hand -> torch's store at MASTER_ADDR:MASTER_PORT -> address of the first rank
Lightning's launcher    -> environment variable                     -> address of the first rank
"""

from __future__ import annotations

import functools
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ragen_pl.base.error_text import exit_code
from ragen_pl.base.stop_signals import Stopped
from ragen_pl.checkpoints.folder import Run, is_launched, outside_processes
from ragen_pl.config.ending import Ending, ending_of
from ragen_pl.config.errors import ConfigError
from ragen_pl.engines.errors import RolloutError

# a run with one rank loads nothing of the others
if TYPE_CHECKING:
    from lightning.pytorch.plugins.environments import ClusterEnvironment
    from omegaconf import DictConfig

    from ragen_pl.ranks.rank_watch import RankWatch

_ADDRESS = "RAGEN_PL_RANKS"
# seconds that a look for the first rank's address takes at most; it is repeated
_LOOK_S = 5


class _Process:
    """This process as a rank, of one run at a time."""

    watch: RankWatch | None = None
    # of a machine, and of the run
    devices = nodes = 1
    # returns what to do after an unexpected error
    remedy: Callable[[], str] | None = None
    # whether an error has been reported, or there was none
    concluded = False
    # changes of phase that this rank has come to; the start is number 0
    changes = 0
    # of this start alone
    store: Any = None


def cluster_environment() -> ClusterEnvironment:
    """Return Lightning's view of the launcher of this process.

    SLURM's has no requeueing: Lightning would save in a signal handler, in the midst of a collective. A signal is
    noted by `StopSignals` instead, and the job's script requeues.
    """
    from lightning.pytorch.plugins import environments as kinds

    if kinds.TorchElasticEnvironment.detect():
        return kinds.TorchElasticEnvironment()
    if kinds.SLURMEnvironment.detect():
        return kinds.SLURMEnvironment(auto_requeue=False)
    for kind in (kinds.LSFEnvironment, kinds.MPIEnvironment):
        if kind.detect():
            return kind()
    return kinds.LightningEnvironment()


@contextmanager
def ranks_end_together(*, devices: int = 1, nodes: int = 1) -> Iterator[None]:
    """Let an error in the block end all ranks, and one of another rank end this one.

    Args:
        devices: Ranks on each machine, for launchers that do not number all ranks.
        nodes: Number of machines.
    """
    _Process.devices, _Process.nodes, _Process.remedy = devices, nodes, None
    _Process.concluded, _Process.changes = False, 0
    try:
        yield
    except BaseException as error:
        _conclude(error)
        raise
    else:
        leave()
    finally:
        _close()


def early_end_reported(main: Callable[[], None]) -> Callable[[], None]:
    """Wrap a command so that other ranks are notified of one that ends before its run began, for a wrong setting."""

    @functools.wraps(main)
    def wrapped() -> None:
        _Process.concluded = False
        try:
            main()
        except SystemExit as error:
            if error.code not in (0, None) and not _Process.concluded and (watch := join()):
                code = exit_code(error)
                watch.conclude(Ending(f"exit code {code}; see its output", code=code))
            raise
        finally:
            _close()

    return wrapped


def join() -> RankWatch | None:
    """Connect this process to the other ranks if it was started as one of several."""
    if _Process.watch is None:
        _Process.watch = _watch_from_outside()
    return _Process.watch


def is_first() -> bool:
    """Return whether this process is the first rank, or will start the others."""
    watch = join()
    return not is_launched() if watch is None else watch.rank == 0


def serve_launched_ranks(count: int) -> None:
    """Let the ranks that this process is about to launch connect to it.

    Args:
        count: Number of ranks, with this one.
    """
    from ragen_pl.ranks.rank_watch import RankWatch

    if _Process.watch is None:
        _Process.watch = RankWatch(0, count=count, remedy=_remedy)
    if address := _Process.watch.address:
        os.environ[_ADDRESS] = address


def set_remedy(remedy: Callable[[], str]) -> None:
    """Let the first rank print a remedy with another one's unexpected error."""
    _Process.remedy = remedy


def agree(cfg: DictConfig, run: Run) -> None:
    """Check that all ranks are of one run, before a model is loaded. Each that was started from outside must call it.

    Ranks that another one has launched have its folder and its command.

    Args:
        cfg: The run's config.
        run: The run as this rank has found it; its folder exists on the first rank.

    Raises:
        RankFailedError: They differ, or a rank is missing. The first process of each machine prints it in one line.
        ConfigError: The first rank is missing.
    """
    watch, outside, devices = join(), outside_processes(), cfg.trainer.devices
    given = devices * _Process.nodes if isinstance(devices, int) and devices > 0 else None
    members, step = (outside, 1) if outside > 1 else (_Process.nodes, _Process.devices)
    # where the launcher and the config do not fit together, Lightning says it
    unfit = outside > 1 and given not in (None, outside)
    if watch is None or members < 2 or unfit:
        return
    from ragen_pl.ranks.rank_agreement import agree_with_others
    from ragen_pl.ranks.same_run import config_digests

    port = agree_with_others(
        watch,
        config_digests(cfg),
        run,
        members=members,
        step=step,
        store=_store_of_this_start,
        limit_s=cfg.trainer.timeout_s,
        folder_s=cfg.trainer.shared_folder_s,
    )
    if port is not None:
        os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def _store_of_this_start() -> int | None:
    """Serve a store for the process group, and return its port; None where the launcher starts no rank again.

    The store of torchrun's agent outlives the ranks: one that is started again would find the addresses of ranks that
    have ended, and fail to connect.
    """
    if not _agent_serves():
        return None
    from torch.distributed import TCPStore

    _Process.store = TCPStore(
        os.environ["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False, multi_tenant=True
    )
    return int(_Process.store.port)


def enter_phase(label: str, *, count: int, limit_s: float, stall_s: float) -> None:
    """Say that this rank has come to a change of phase. All ranks must, one after the other or at once.

    Args:
        label: Name of the point in the run.
        count: Number of ranks.
        limit_s: Seconds that the first rank that comes waits for the last one.
        stall_s: Seconds after these in which something else has to happen.
    """
    if (watch := _Process.watch) is not None:
        from ragen_pl.ranks.rank_limits import Change

        _Process.changes += 1
        watch.send({"change": asdict(Change(_Process.changes, label, limit_s, count))})
        watch.stall.move(label, limit_s + stall_s)


def heartbeat(label: str, *, stall_s: float) -> None:
    """Say that something has happened on this rank.

    Args:
        label: Where the run is.
        stall_s: Seconds in which something else has to happen.
    """
    if (watch := _Process.watch) is not None:
        watch.stall.move(label, stall_s)


def suspend_limits() -> None:
    """Suspend this rank's limits, for work that it does alone."""
    if (watch := _Process.watch) is not None:
        watch.stall.stop()


def report(error: BaseException) -> None:
    """Report an error before it has reached the end of the run: closing objects on its way there may take long."""
    # torch is loaded by then
    from ragen_pl.base.finite import NonFiniteError
    from ragen_pl.checkpoints.rank_states import RankStatesError

    if isinstance(error, NonFiniteError) and error.on_all_ranks and not is_first():
        return
    if isinstance(error, RolloutError | NonFiniteError | RankStatesError):
        # as the run ends with it
        error = ConfigError(str(error))
    watch = _Process.watch
    if watch is None:
        return
    from ragen_pl.ranks.rank_watch import RankFailedError

    if not isinstance(error, RankFailedError):
        watch.report(ending_of(error))


def leave() -> None:
    """Say that this rank ends by itself, without an error."""
    _Process.concluded = True
    if _Process.watch is not None:
        _Process.watch.leave()


def _conclude(error: BaseException) -> None:
    """Find out which rank's error ends the run and print it; return in a process that is the only rank.

    Raises:
        SystemExit: With the exit code of the run.
    """
    _Process.concluded = True
    watch = join()
    if watch is None or watch.has_left:
        return
    if isinstance(error, KeyboardInterrupt):
        watch.leave()
        return
    if isinstance(error, Stopped):
        error.code = watch.stop(Ending(str(error), code=exit_code(error)))
        return
    from ragen_pl.ranks.rank_watch import RankFailedError

    if isinstance(error, RankFailedError):
        watch.show()
    elif watch.conclude(ending_of(error)):
        _tell_torchrun(error)
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            traceback.print_exception(error)
        else:
            # now, since the other ranks may take long to end
            ending_of(error).show()
    raise SystemExit(watch.code) from None


def _tell_torchrun(error: BaseException) -> None:
    """Leave the error for torchrun's own report of the rank that failed first."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def _close() -> None:
    if _Process.watch is not None:
        _Process.watch.close()
        _Process.watch = None
    os.environ.pop(_ADDRESS, None)


def _watch_from_outside() -> RankWatch | None:
    """Return the watch of a process that torchrun, srun, another rank or a person has started as one of several."""
    number = os.environ.get("RANK") or os.environ.get("SLURM_PROCID")
    local = int(os.environ.get("LOCAL_RANK", 0))
    rank = int(number) if number else int(os.environ.get("NODE_RANK", 0)) * _Process.devices + local
    address, count = os.environ.get(_ADDRESS), outside_processes()
    if not address and count == _Process.nodes == 1:
        return None
    from ragen_pl.ranks.rank_watch import RankWatch

    if address:
        return RankWatch(rank, address=address, launched=True)
    meeting = _Store.found(rank)
    if meeting is None:
        return None
    # of the processes on another machine, Lightning may have launched all but the first
    return RankWatch(
        rank,
        count=count if count > 1 else None,
        meeting=meeting,
        launched=is_launched(),
        remedy=_remedy,
        shows=int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0) == 0,
    )


def _remedy() -> str:
    return "" if _Process.remedy is None else _Process.remedy()


def _agent_serves() -> bool:
    """Return whether torchrun's agent serves the store of its ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


class _Store:
    """The store that the process group will use, with the address of the first rank.

    Args:
        rank: Number of this rank.
        host: Machine of the first rank.
        port: Port of the store.
    """

    def __init__(self, rank: int, host: str, port: int) -> None:
        self.rank, self.host, self.port = rank, host, port
        # The agent's store outlives the ranks. The address of an earlier start is replaced, and its token is not the
        # hub's. The number of the start is no part of the key: each machine's agent counts by itself.
        self._agent_serves = _agent_serves()
        self._key = "ragen_pl/ranks"
        self._store: Any = None

    @classmethod
    def found(cls, rank: int) -> _Store | None:
        """Return the store that the environment names, None if it names none."""
        if "SLURM_PROCID" in os.environ and "RANK" not in os.environ:
            environment = cluster_environment()
            return cls(rank, environment.main_address, environment.main_port)
        if "MASTER_PORT" not in os.environ:
            return None
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        return cls(rank, host, int(os.environ["MASTER_PORT"]))

    def publish(self, port: int, token: str) -> None:
        """Leave the port and token of the first rank's hub.

        Raises:
            OSError: The store cannot be reached yet.
        """
        with _torch_errors():
            self._opened().set(self._key, f"{self.host}:{port}:{token}")

    def address(self) -> str:
        """Return `host:port:token`.

        Raises:
            OSError: The first rank has not left it yet.
        """
        with _torch_errors():
            store = self._opened()
            if not store.check([self._key]):
                raise OSError(f"{self._key} is not in the store yet")
            return str(store.get(self._key).decode())

    def _opened(self) -> Any:
        if self._store is None:
            from torch.distributed import TCPStore

            serves = self.rank == 0 and not self._agent_serves
            if not serves:
                # torch prints its stack while it waits for a server
                socket.create_connection((self.host, self.port), _LOOK_S).close()
            self._store = TCPStore(
                self.host,
                self.port,
                is_master=serves,
                timeout=timedelta(seconds=_LOOK_S),
                wait_for_workers=False,
                # the process group shares it
                multi_tenant=True,
            )
        return self._store


@contextmanager
def _torch_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # of the store
        raise OSError(str(error)) from error
