"""Tiny models; one thread a test process, and no setting of the user's shell in the tests."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from support.models.tiny_models import TEXT, VISION

from ragen_pl.base.machine import rarer_collections

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ragen_pl.models.bundle import ModelBundle

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that would reach for a model hub fails at once
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
# an example may take long on a busy machine
settings.register_profile("any_load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_load")
# when garbage collections last left the objects of imports out
_imported: set[str] = set()
# nanobind reports what is not collected at the end as leaked
atexit.register(gc.unfreeze)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure when it happens, which a run that is cut off would not show."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid} failed in {report.when}:\n{report.longreprtext}", flush=True)


def pytest_runtest_logfinish() -> None:
    """Leave what many imports have made, a million objects, out of garbage collections, as a run does."""
    if len(sys.modules) > len(_imported) + 100:
        _imported.update(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _collections() -> Iterator[None]:
    """Look for garbage as rarely as a run does."""
    with rarer_collections():
        yield


@pytest.fixture(scope="session", autouse=True)
def _account(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the key that signs settings away from the user's own."""
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))


@pytest.fixture(autouse=True)
def _shell_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "HYDRA_FULL_ERROR", "RAGEN_PL_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def lm() -> ModelBundle:
    """A tiny language model with random weights."""
    from ragen_pl.models.build import build_small_lm

    return build_small_lm(seed=0, text=TEXT)


@pytest.fixture(scope="session")
def vlm() -> ModelBundle:
    """A tiny vision-language model with random weights."""
    from ragen_pl.models.build import build_small_vlm

    return build_small_vlm(seed=0, text=TEXT, vision=VISION)


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tracking store whose tables exist. MLflow needs seconds to create them."""
    from ragen_pl.tracking.mlflow_outbox import client_of_new_store

    file = tmp_path_factory.mktemp("store") / "mlflow.db"
    client_of_new_store(f"sqlite:///{file}").search_experiments()
    return file
