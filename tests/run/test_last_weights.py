"""The end of a run: its last weights are measured while they are on their device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import Strategy
from support.runs.composing import composed

from ragen_pl.data.validation import ValidationSet
from ragen_pl.run.train import TrainedRun, train
from ragen_pl.run.trainer import RunTrainer

SMALL = (
    "env=frozenlake_visual", "trainer.accelerator=cpu", "rollout.groups=2", "rollout.group_size=2",
    "rollout.max_response_tokens=4", "env.max_turns=1", "update.minibatches=1", "validation.episodes=2",
    "validation.baselines=null", "warm_start.enabled=false", "callbacks.progress=null", "callbacks.plots=null",
    "callbacks.trajectories=null", "logger=none",
)  # fmt: skip


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Validations, blank-image episodes and the start of a teardown, in their order."""
    noted: list[str] = []
    play, teardown = ValidationSet.play, Strategy.teardown

    def noted_play(self: ValidationSet, *arguments: object, **settings: object) -> object:
        # a validation shows its progress by its batches
        noted.append("blank" if "progress" in settings else "validation")
        return play(self, *arguments, **settings)

    def noted_teardown(self: Strategy) -> None:
        module = self.lightning_module
        states = [state for optimizer in self.optimizers for state in optimizer.state]
        gradients = [one for one in module.parameters() if one.grad is not None]
        noted.append(f"teardown with {len(states)} states and {len(gradients)} gradients")
        teardown(self)

    monkeypatch.setattr(ValidationSet, "play", noted_play)
    monkeypatch.setattr(Strategy, "teardown", noted_teardown)
    return noted


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., TrainedRun]:
    """Return a function that trains in one folder."""

    def start(*overrides: str) -> TrainedRun:
        paths = (f"paths.root={tmp_path}", f"paths.run_dir={tmp_path / 'run'}")
        return train(composed(*SMALL, *overrides, *paths))

    return start


BARE = "teardown with 0 states and 0 gradients"


def test_nothing_is_left_to_measure_when_the_model_leaves_its_device(
    run: Callable[..., TrainedRun], events: list[str]
) -> None:
    first = run("trainer.max_epochs=1")
    assert events == ["validation", "validation", "blank", BARE]
    assert "val/return" in first.metrics and "blank_images/return" in first.metrics
    # a notebook shows it: the folder, and neither all metrics nor the model
    assert repr(first) == f"TrainedRun(folder={first.folder!r})"
    # it has finished: it measures as it did
    events.clear()
    again = run("trainer.max_epochs=1", f"ckpt_path={first.checkpoint}")
    assert events == [BARE, "validation", "blank", BARE]
    assert all(
        again.metrics[name] == value
        for name, value in first.metrics.items()
        if name.startswith(("val/", "blank_images/"))
    )


def test_a_run_without_validation_plays_nothing(
    run: Callable[..., TrainedRun], events: list[str]
) -> None:
    metrics = run("trainer.max_epochs=1", "trainer.limit_val_batches=0").metrics
    assert events == [BARE] and "update/loss" in metrics


class Adam(BoringModel):
    """A model whose optimizer has a state."""

    has_state = False

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def on_train_end(self) -> None:
        gradients = all(weight.grad is not None for weight in self.parameters())
        self.has_state = gradients and len(self.optimizers(use_pl_optimizer=False).state) == 2


def test_the_state_of_the_optimizer_is_dropped_where_the_model_leaves_its_device(
    tmp_path: Path, events: list[str]
) -> None:
    trainer = RunTrainer(
        accelerator="cpu", logger=False, max_steps=2, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=0, default_root_dir=tmp_path,
    )  # fmt: skip
    model = Adam()
    for steps in (2, 4):
        trainer.fit_loop.epoch_loop.max_steps = steps
        trainer.fit(model)
        assert trainer.global_step == steps and model.has_state
        # otherwise a checkpoint that lacks the state looks like one that has it
        with pytest.raises(RuntimeError, match=r"a\.ckpt: the end of fit has dropped the opti"):
            trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert events == [BARE, BARE]
    trainer.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert saved.keys() == model.state_dict().keys()
