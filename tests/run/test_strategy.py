"""`trainer.strategy` and `trainer.timeout_s` as Lightning gets them."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from ragen_pl.callbacks.checkpoint import BestCheckpoint
from ragen_pl.callbacks.progress import RolloutProgress
from ragen_pl.config import ConfigError
from ragen_pl.run import trainer as trainer_module
from ragen_pl.run.strategy import FSDP2Strategy
from ragen_pl.run.trainer import build_strategy, build_trainer

DDP = "lightning.pytorch.strategies.DDPStrategy"
MINUTE = timedelta(seconds=60)


@pytest.mark.parametrize(
    ("strategy", "kind", "options"),
    [
        ("auto", DDPStrategy, {}),
        ("ddp", DDPStrategy, {}),
        (
            "ddp_find_unused_parameters_true",
            DDPStrategy,
            {"find_unused_parameters": True},
        ),
        ("fsdp2", FSDP2Strategy, {}),
        (
            {"_target_": DDP, "find_unused_parameters": True},
            DDPStrategy,
            {"find_unused_parameters": True},
        ),
    ],
)
def test_the_time_limit_and_the_backend_reach_every_strategy(strategy, kind, options):
    built = build_strategy(strategy, ranks=2, timeout_s=60, backend="cpu:gloo,cuda:nccl")
    assert type(built) is kind
    assert (built._timeout, built.process_group_backend) == (MINUTE, "cpu:gloo,cuda:nccl")
    if kind is DDPStrategy:
        assert built._ddp_kwargs == options


def test_a_strategy_with_a_limit_of_its_own_keeps_it():
    limit = {"_target_": "datetime.timedelta", "minutes": 5}
    built = build_strategy({"_target_": DDP, "timeout": limit}, ranks=2, timeout_s=60)
    assert built._timeout == timedelta(minutes=5)


def test_one_rank_has_no_limit():
    assert build_strategy("auto", ranks=1, timeout_s=60) == "auto"
    trainer = build_trainer({"accelerator": "cpu", "timeout_s": 60}, logger=False)
    assert isinstance(trainer.strategy, SingleDeviceStrategy)


def test_several_devices_get_the_limit_of_the_config():
    settings = {"accelerator": "cpu", "devices": 2, "timeout_s": 60, "strategy": "auto"}
    assert build_trainer(settings, logger=False).strategy._timeout == MINUTE


@pytest.mark.parametrize(
    ("callbacks", "settings", "displays"),
    [
        ([], {}, []),
        ([RolloutProgress()], {}, [RolloutProgress]),
        ([], {"enable_progress_bar": True}, [RichProgressBar]),
    ],
    ids=["none", "the run's", "Lightning's, as asked for"],
)
def test_a_run_without_a_display_gets_none_of_lightnings(callbacks, settings, displays):
    trainer = build_trainer({"accelerator": "cpu", **settings}, callbacks=callbacks, logger=False)
    found = [type(one) for one in trainer.callbacks if isinstance(one, ProgressBar)]
    assert found == displays


@pytest.mark.parametrize("callbacks", [[], [BestCheckpoint()]], ids=["none", "the run's"])
def test_a_run_without_checkpoints_gets_none_of_lightnings(callbacks):
    trainer = build_trainer({"accelerator": "cpu"}, callbacks=list(callbacks), logger=False)
    assert trainer.checkpoint_callbacks == callbacks


@pytest.mark.parametrize(
    ("accelerator", "expected"), [("cpu", None), ("cuda", "cpu:gloo,cuda:nccl")]
)
def test_ranks_with_gpus_exchange_objects_in_the_hosts_memory(monkeypatch, accelerator, expected):
    """NCCL alone would take them through the memory of the GPUs."""
    backends = []

    def note(strategy, *, backend, **settings):
        backends.append(backend)
        return build_strategy(strategy, backend=backend, **settings)

    monkeypatch.setattr(trainer_module, "build_strategy", note)
    settings = {"accelerator": accelerator, "devices": 1, "strategy": "ddp"}
    if accelerator == "cuda" and not torch.cuda.is_available():
        with pytest.raises(ConfigError):
            build_trainer(settings, logger=False)
    else:
        assert build_trainer(settings, logger=False).strategy.process_group_backend == expected
    assert backends == [expected]
