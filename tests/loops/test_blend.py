"""A penalty on the divergence that gives way to RL over the iterations."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from support.runs.composing import composed

from ragen_pl.assembly.component_checks import check_components
from ragen_pl.callbacks.blend import BlendTeacher
from ragen_pl.config import ConfigError
from ragen_pl.environments.calls import make_environment


class Seen(pl.Callback):
    """Keeps the coefficients at each step, and saves a checkpoint after the sixth."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.steps: list[tuple[float, float]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.steps.append((pl_module.loss.kl.coefficient, pl_module.loss.policy_coefficient))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.file is not None and len(self.steps) == 6:
            trainer.save_checkpoint(self.file)


def test_coefficients_follow_the_iterations_also_where_a_run_is_resumed(setup_of, tmp_path):
    setup, file = setup_of(trainer={"limit_val_batches": 0}), tmp_path / "sixth.ckpt"
    seen = Seen(file)
    whole, points, _ = setup.fit(BlendTeacher(iterations=2), seen)
    # of the penalty 0.1, and of the policy's loss 1
    expected = [(0.1, 0.0)] * 4 + [(0.05, 0.5)] * 4 + [(0.0, 1.0)] * 4
    assert seen.steps == [pytest.approx(step) for step in expected]
    losses = [point["update/kl_loss"] for _, point in points if "update/kl_loss" in point]
    assert losses[1] > 0 and losses[2] == 0
    # inside the second iteration
    resumed = Seen()
    other, _, _ = setup.fit(BlendTeacher(iterations=2), resumed, ckpt_path=str(file))
    assert resumed.steps == seen.steps[6:]
    states = [agent.state_dict() for agent in (whole, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm=rloo"], "place=reward; both coef"),
        (["algorithm=starpo", "algorithm.loss.kl=null"], "no divergence from a teacher; set"),
        (["algorithm=opsd"], "policy_coefficient=0 and"),
    ],
)
def test_a_loss_without_both_terms_is_refused(overrides, message):
    blend = "callbacks.blend={_target_: ragen_pl.callbacks.blend.BlendTeacher, iterations: 4}"
    cfg = composed("env=frozenlake", *overrides, blend)
    with pytest.raises(ConfigError, match=message):
        check_components(cfg, {cfg.env.name: make_environment(cfg.env).unwrapped})
