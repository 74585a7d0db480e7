"""Loggers of a run that need an extra: Weights & Biases, and TensorBoard."""

from __future__ import annotations

import json
import logging
import threading
from argparse import Namespace
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import OmegaConf
from PIL import Image

from ragen_pl.base.files import atomic_write
from ragen_pl.base.foreign_files import json_object
from ragen_pl.config.errors import ConfigError
from ragen_pl.metrics.record import FILE, Point
from ragen_pl.tracking.loggers import KeepsRecord
from ragen_pl.tracking.mlflow_run import flattened

log = logging.getLogger(__name__)
_WANDB_RUN = "wandb_run.json"
# seconds to send what is left, at the end of the run
_FINISH_S = 60.0


class RunWandbLogger(KeepsRecord, WandbLogger):
    """Weights & Biases logger of one run folder: one run there, however often it is resumed.

    Args:
        run_dir: The run's folder, which stores the id of the run.
        settings: The resolved config.
        project: Project of the run.
        offline: Write files only, which `wandb sync` sends later.

    Raises:
        ConfigError: The server does not accept the run.
    """

    needs_trust = ("*",)

    @classmethod
    def check_settings(cls, settings: Mapping[str, Any], *, root: str) -> None:
        """Check that the package is installed and has a key."""
        _require("wandb", extra="wandb")
        import wandb

        if not settings.get("offline") and wandb.api.api_key is None:
            raise ConfigError(
                "logger.offline=false: Weights & Biases has no API key; run wandb login, or set logger.offline=true"
            )

    def __init__(
        self,
        *,
        run_dir: str,
        settings: Mapping[str, Any] | None = None,
        project: str = "ragen_pl",
        offline: bool = False,
    ) -> None:
        self.folder = Path(run_dir).absolute()
        WandbLogger.__init__(
            self,
            name="/".join(self.folder.parts[-2:]),
            save_dir=self.folder,
            project=project,
            offline=offline,
        )
        self._trouble = _Trouble("Weights & Biases")
        if rank_zero_only.rank:  # type: ignore[attr-defined]
            return
        self.open_record(self.folder)
        self._wandb_init["id"] = self._id = self._known_id()
        try:
            self.log_hyperparams(dict(settings or {}))
        except Exception as error:  # of its many kinds
            raise ConfigError(
                f"logger: Weights & Biases refused: {' '.join(str(error).split())}; set logger.offline=true or another "
                "logger"
            ) from error

    def _known_id(self) -> str:
        file = self.folder / _WANDB_RUN
        known = (json_object(file) or {}).get("id")
        if isinstance(known, str) and known.isalnum():
            return known
        name = uuid4().hex
        with atomic_write(file) as partial:
            partial.write_text(json.dumps({"id": name}))
        return name

    def track(self, point: Point) -> None:
        """Log a point that was not logged before."""
        if point.tracked:
            with self._trouble:
                WandbLogger.log_metrics(self, point.metrics, point.step)

    @rank_zero_only
    def log_files(self, path: Path, *, place: str) -> None:
        """Log an image; other files stay in the run's folder."""
        if path.suffix == ".png":
            import wandb

            with self._trouble:
                self.experiment.log({f"{place}/{path.stem}": wandb.Image(str(path))})

    @rank_zero_only
    def close(self) -> None:
        """Send the remaining records, in a limited time."""
        with self._trouble:
            # the package has no limit of its own
            thread = threading.Thread(target=self.experiment.finish, daemon=True)
            thread.start()
            thread.join(_FINISH_S)
            if thread.is_alive():
                log.warning(
                    f"Weights & Biases: not all is sent after {_FINISH_S:g} s; wandb sync "
                    f"{Path(self.experiment.dir).parent} sends it"
                )


class RunTensorBoardLogger(KeepsRecord, TensorBoardLogger):
    """TensorBoard files in `<run_dir>/tensorboard`, which a resumed run continues.

    Args:
        run_dir: The run's folder.
        settings: The resolved config, shown as a text.
    """

    needs_trust = ("*",)

    @classmethod
    def check_settings(cls, settings: Mapping[str, Any], *, root: str) -> None:
        """Check that the package is installed."""
        _require("tensorboard", extra="tensorboard")

    def __init__(self, *, run_dir: str, settings: Mapping[str, Any] | None = None) -> None:
        TensorBoardLogger.__init__(
            self, save_dir=run_dir, name="", version="tensorboard", default_hp_metric=False
        )
        if rank_zero_only.rank:  # type: ignore[attr-defined]
            return
        self.open_record(Path(run_dir))
        self._step = 0
        text = OmegaConf.to_yaml(OmegaConf.create(dict(settings or {})))
        # indented text is shown as it is
        self.experiment.add_text("config", "".join(f"    {line}\n" for line in text.splitlines()))

    @rank_zero_only
    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """Show the run's additions to its config as a text."""
        for name, value in flattened(vars(params) if isinstance(params, Namespace) else params):
            self.experiment.add_text(name, value)

    def track(self, point: Point) -> None:
        """Log a point that was not logged before."""
        self._step = point.step
        if point.tracked:
            TensorBoardLogger.log_metrics(self, point.metrics, point.step)
            self.experiment.flush()

    @rank_zero_only
    def log_files(self, path: Path, *, place: str) -> None:
        """Log an image at the last step; other files stay in the run's folder."""
        if path.suffix == ".png":
            image = np.asarray(Image.open(path).convert("RGB"))
            self.experiment.add_image(f"{place}/{path.stem}", image, self._step, dataformats="HWC")

    @rank_zero_only
    def close(self) -> None:
        """Close the files."""
        self.experiment.close()


class _Trouble:
    """Context in which an error of a server is logged once, and ends nothing."""

    def __init__(self, name: str) -> None:
        self.name, self._has_warned = name, False

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        if not self._has_warned:
            self._has_warned = True
            text = " ".join(str(error).split())
            log.warning(f"{self.name}: {text}; the run goes on, and its metrics are in {FILE}")
        return True


def _require(package: str, *, extra: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(
            f"logger={extra}: {package} is not installed; pip install 'ragen_pl[{extra}]'"
        )
