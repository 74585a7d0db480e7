"""Records of a run that has ended, sent to MLflow by a later process."""

from __future__ import annotations

from pathlib import Path

from ragen_pl.base.settings_files import newest_settings
from ragen_pl.checkpoints.lock import hold
from ragen_pl.config.errors import ConfigError, config_errors
from ragen_pl.config.own_files import is_own_folder
from ragen_pl.tracking.loggers import sender_of
from ragen_pl.tracking.mlflow_calls import FOLDER
from ragen_pl.tracking.mlflow_run import RUN_FILE, known_run, may_name
from ragen_pl.tracking.outbox import Outbox

# for the calls of a whole run
_LIMIT_S = 3600.0


def send_unsent(folder: Path, *, trusted: bool = False) -> str:
    """Send the unsent records of a run that has ended to MLflow; return a report.

    Args:
        folder: The run's folder.
        trusted: Whether it is taken at its word, whoever wrote it.

    Raises:
        ConfigError: It cannot be sent, the run is under way, is not in MLflow, or may be somebody else's.
    """
    if not (trusted or is_own_folder(newest_settings(folder))):
        from ragen_pl.config.trust import check_folder

        check_folder(folder, key=f"run={folder}")
    known = known_run(folder)
    # a run's folder is in <root>/<environment>
    if known and not (trusted or may_name(known, folder.parent.parent)):
        raise ConfigError(
            f"run={folder}: {RUN_FILE} names {known['tracking_uri']}, and nothing shows that this account wrote the "
            "file, so nothing is sent there; set trust=true if you trust its author"
        )
    if not known:
        raise ConfigError(
            f"run={folder}: expected the folder of a run in MLflow, with its {RUN_FILE}"
        )
    with hold(folder), config_errors(f"run={folder}"):
        sender = sender_of(folder, trusted=trusted)
        sender.check()
        outbox = Outbox(folder / FOLDER, sender)
        unsent = outbox.close(limit_s=_LIMIT_S)
    if unsent is not None:
        raise ConfigError(
            f"MLflow at {known['tracking_uri']}: {unsent}; start the server or repair the store, and repeat the command"
        )
    return f"MLflow at {known['tracking_uri']} has all of {folder}"
