"""The best validation of a run, those before the first iteration and of the last weights among them."""

from __future__ import annotations

import functools

import lightning.pytorch as pl
import pytest
import torch
from omegaconf import OmegaConf

from ragen_pl.callbacks.checkpoint import BestCheckpoint, RunCheckpoint
from ragen_pl.config import config_dir


def fit(setup, folder, scores, *, callbacks=(), **changes):
    """Run three iterations of four steps with these successes and returns, in the order of the validations."""
    setup.frozenlake = {"max_turns": 1}
    agent, datamodule = setup.build()
    left = list(scores)

    def log_scores() -> None:
        success, mean_return = left.pop(0)
        agent.log_dict({"val/success": success, "val/return": mean_return})

    agent.on_validation_epoch_end = log_scores
    best = BestCheckpoint()
    best.dirpath = str(folder)
    setup.build = lambda: (agent, datamodule)
    agent, _, _ = setup.fit(
        best,
        *callbacks,
        enable_checkpointing=True,
        check_val_every_n_epoch=2,
        default_root_dir=folder,
        **({"limit_val_batches": 1} | changes),
    )
    return agent, best, left


@pytest.mark.parametrize(
    "scores, step",
    [
        # before the first iteration, after the second and after the third, the last one
        ([(0.9, 0.0), (0.5, 0.0), (0.6, 0.0)], 0),
        ([(0.1, 0.0), (0.5, 0.0), (0.4, 0.0)], 8),
        ([(0.1, 0.0), (0.5, 0.0), (0.6, 0.0)], 12),
        # of equals by the return, else the earliest
        ([(0.9, 0.2), (0.9, 0.1), (0.9, 0.2)], 0),
        ([(0.9, 0.2), (0.9, 0.1), (0.9, 0.3)], 12),
        # an environment without success
        ([(0.0, -3.0), (0.0, -1.0), (0.0, -2.0)], 8),
        ([(0.0, -3.0), (0.1, -9.0), (0.0, -2.0)], 8),
    ],
)
def test_all_validations_compete(setup_of, tmp_path, scores, step):
    _, best, left = fit(setup_of(), tmp_path, scores)
    saved = torch.load(tmp_path / "best.ckpt", weights_only=True)
    assert not left and saved["global_step"] == step
    (state,) = [value for name, value in saved["callbacks"].items() if "BestCheckpoint" in name]
    assert state["best_model_path"] == best.best_model_path == str(tmp_path / "best.ckpt")
    assert (float(state["best_model_score"]), state["best_return"]) == pytest.approx(
        scores[[0, 8, 12].index(step)]
    )


def test_last_checkpoint_holds_the_best_score_of_its_iteration(setup_of, tmp_path):
    run = RunCheckpoint(dirpath=str(tmp_path), every_n_epochs=1, save_on_train_epoch_end=True)
    fit(setup_of(), tmp_path, [(0.1, 0.0), (0.5, 0.0), (0.6, 0.0)], callbacks=[run])
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]
    (state,) = [state for name, state in saved.items() if name.startswith("BestCheckpoint")]
    assert float(state["best_model_score"]) == pytest.approx(0.6)
    configured = OmegaConf.load(config_dir() / "callbacks" / "default.yaml")
    assert list(configured)[:2] == ["best", "checkpoint"]


def test_a_run_resumes_from_the_weights_before_its_first_iteration(setup_of, tmp_path):
    scores = [(0.9, 0.0), (0.5, 0.0), (0.6, 0.0)]
    whole, _, _ = fit(setup_of(), tmp_path / "whole", scores)
    resumed, best, left = fit(
        setup_of(), tmp_path / "whole", scores[1:], ckpt_path=str(tmp_path / "whole" / "best.ckpt")
    )
    assert not left and float(best.best_model_score) == pytest.approx(0.9)
    for weight, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(weight, expected)


@pytest.mark.parametrize("iteration", [2, 3])
def test_a_run_that_goes_on_after_a_validation_keeps_its_weights(setup_of, tmp_path, iteration):
    scores = [(0.1, 0.0), (0.5, 0.0), (0.6, 0.0)]
    every = functools.partial(
        RunCheckpoint,
        dirpath=str(tmp_path), filename="{epoch}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=False,
    )  # fmt: skip
    fit(setup_of(), tmp_path, scores, callbacks=[every()])
    (tmp_path / "best.ckpt").unlink()
    file = tmp_path / f"epoch={iteration - 1}.ckpt"
    # the validations that are left are worse
    worse = [(0.2, 0.0)] * (3 - iteration)
    _, best, left = fit(setup_of(), tmp_path, worse, ckpt_path=str(file), callbacks=[every()])
    assert not left and float(best.best_model_score) == pytest.approx(scores[iteration - 1][0])
    saved = torch.load(tmp_path / "best.ckpt", weights_only=True)
    assert saved["global_step"] == 4 * iteration


@pytest.mark.parametrize(
    "other, own, step",
    [
        # before the first iteration and after the second; then after the second and the third, or the third
        ((0.9, 0.1), (0.5, 0.6), 0),
        ((0.5, 0.1), (0.5, 0.6), 12),
        ((0.1, 0.8), (0.6,), 8),
    ],
)
def test_weights_of_another_run_compete_if_they_were_validated(
    setup_of, tmp_path, other, own, step
):
    def run(name, successes, **changes):
        scores = [(success, 0.0) for success in successes]
        _, best, left = fit(setup_of(), tmp_path / name, scores, **changes)
        assert not left
        return best

    begins_with = run("other", other, max_epochs=2).best_model_path
    best = run("own", own, ckpt_path=begins_with)
    assert float(best.best_model_score) == pytest.approx(max(*other, *own))
    assert torch.load(tmp_path / "own" / "best.ckpt", weights_only=True)["global_step"] == step


def test_a_run_that_ends_by_steps_validates_its_last_weights(setup_of, tmp_path):
    _, _, left = fit(setup_of(), tmp_path, [(0.1, 0.0), (0.2, 0.0)], max_steps=3, max_epochs=9)
    assert not left
    assert torch.load(tmp_path / "best.ckpt", weights_only=True)["global_step"] == 3


def test_nothing_is_validated_without_batches(setup_of, tmp_path):
    fit(setup_of(), tmp_path, [], limit_val_batches=0)
    assert not (tmp_path / "best.ckpt").exists()


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_run_whose_folder_was_moved_keeps_its_best_weights(setup_of, tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"

    def run(folder, scores, **changes):
        every = RunCheckpoint(dirpath=str(folder), every_n_epochs=1, save_on_train_epoch_end=True)
        return fit(setup_of(), folder, scores, callbacks=[every], **changes)

    run(there, [(0.9, 0.0), (0.5, 0.0)], max_epochs=2)
    there.rename(here)
    _, best, left = run(here, [(0.6, 0.0)], ckpt_path=str(here / "last.ckpt"))
    assert not left and float(best.best_model_score) == pytest.approx(0.9)
    assert best.best_model_path == str(here / "best.ckpt")
    assert torch.load(here / "best.ckpt", weights_only=True)["global_step"] == 0
    # better weights replace them, in this folder
    here.rename(there)
    _, best, _ = run(there, [(1.0, 0.0)], ckpt_path=str(there / "last.ckpt"), max_epochs=4)
    assert list(best.best_k_models) == [best.best_model_path] == [str(there / "best.ckpt")]
    assert torch.load(there / "best.ckpt", weights_only=True)["global_step"] == 16


class StopsLate(pl.Callback):
    """Stops a run at the end of its first iteration, after the place of its validation."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.should_stop = True


def test_a_run_that_is_stopped_after_its_validations_has_another_one(setup_of, tmp_path):
    _, _, left = fit(setup_of(), tmp_path, [(0.1, 0.0), (0.2, 0.0)], callbacks=[StopsLate()])
    assert not left
    assert torch.load(tmp_path / "best.ckpt", weights_only=True)["global_step"] == 4
