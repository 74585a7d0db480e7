"""A gradient that is not finite changes no weight, is counted, and ends the run where it comes again and again."""

from __future__ import annotations

import copy
import functools
import math
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.precision import MixedPrecision

from envs.policies import NoisyPolicy
from ragen_pl.base.finite import NonFiniteError
from ragen_pl.data.demonstrations import DemonstrationDataModule
from ragen_pl.data.recorded_step import RecordedStep
from ragen_pl.data.settings import WarmStartSettings
from ragen_pl.environments.manager import EnvironmentManager
from ragen_pl.modules.guard import SkippedSteps, SkippedStepsError
from ragen_pl.modules.optimizers import OptimizerFactory
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.modules.reference import MovingAverage
from ragen_pl.modules.warm_start import WarmStartModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy

FROZENLAKE = {"target": "ragen/FrozenLake-v0", "max_turns": 3, "kwargs": {"min_distance": 1}}
QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
STEPS = 12
"""Optimizer steps of a run: three iterations of two epochs of two minibatches."""


class InMemory(Logger):
    """Logger that keeps its points."""

    name, version = "memory", 0

    def __init__(self) -> None:
        super().__init__()
        self.points = []

    def log_hyperparams(self, *arguments, **settings) -> None:
        pass

    def log_metrics(self, metrics, step=None) -> None:
        self.points.append((step, dict(metrics)))


class Poison(pl.Callback):
    """Make a gradient NaN in these optimizer steps, counted from 0, and keep what the optimizer changed."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps
        # whether weights and the optimizer's state were the same after the step as before
        self.unchanged: list[bool] = []

    def state(self, trainer: pl.Trainer) -> list[torch.Tensor]:
        optimizer = trainer.optimizers[0].state_dict()["state"]
        moments = [value for entry in optimizer.values() for value in entry.values()]
        return copy.deepcopy(
            [*trainer.lightning_module.parameters(), *map(torch.as_tensor, moments)]
        )

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if trainer.global_step in self.steps:
            next(w for w in pl_module.parameters() if w.grad is not None).grad.flatten()[0] = (
                math.nan
            )
        self.before = self.state(trainer)

    def on_train_batch_end(self, trainer, *_) -> None:
        if not trainer.fit_loop._should_accumulate():
            after = self.state(trainer)
            same = len(after) == len(self.before)
            equal = same and all(map(torch.equal, after, self.before))
            self.unchanged.append(equal)


class SaveAlways(pl.Callback):
    """Write a checkpoint after each minibatch: `<optimizer steps>_<minibatches since>_….ckpt`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        since = (batch_idx + 1) % trainer.accumulate_grad_batches
        name = f"{trainer.global_step}_{since}_{len(self.files)}.ckpt"
        self.files.append(self.folder / name)
        trainer.save_checkpoint(self.files[-1])

    def last(self, step: int) -> Path:
        """Return the one written right after this many steps."""
        return next(file for file in self.files if file.name.startswith(f"{step}_0_"))


class Broken(pl.Callback):
    """Return NaN from a layer in training, from this optimizer step on, on this rank."""

    def __init__(self, *, layer: str, step: int) -> None:
        self.layer, self.step = layer, step

    def on_train_start(self, trainer, pl_module) -> None:
        def spoil(module, arguments, output):
            if trainer.training and pl_module.training and trainer.global_step >= self.step:
                return output * math.nan

        pl_module.get_submodule(self.layer).register_forward_hook(spoil)


def metric(points, name: str) -> list[float]:
    return [point[name] for _, point in points if name in point]


def as_text(points) -> list[str]:
    """Return points in a form in which NaN equals NaN."""
    return [repr((step, sorted(point.items()))) for step, point in points]


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer": {"gradient_clip_val": 0.5}},
        {"tokens_per_microbatch": 150},
        {"dtype": torch.bfloat16, "kl": {"reference": MovingAverage(decay=0.5)}},
        {"lora": {"r": 2}, "dtype": torch.bfloat16, "trainer": {"gradient_clip_val": None}},
    ],
    ids=["clipped", "microbatches", "master weights", "adapters"],
)
def test_a_skipped_step_changes_nothing_and_is_counted(setup_of, changes):
    poison = Poison(5, 10)
    agent, points, _ = setup_of(**changes, weight_decay=0.1).fit(poison)
    assert [step for step, same in enumerate(poison.unchanged) if same] == [5, 10]
    assert len(poison.unchanged) == STEPS
    assert metric(points, "update/skipped_steps") == [0.0, 1.0, 1.0]
    norms = metric(points, "update/gradient_norm_policy")
    assert 0 < norms[0] < math.inf and math.isnan(norms[1]) and math.isnan(norms[2])
    agent.check_weights()


def test_resuming_between_skipped_steps_is_exact(setup_of, tmp_path):
    """Before, inside and between two skipped steps; a third one in a row would end the run."""
    setup = setup_of(tokens_per_microbatch=150)
    save, skipped = SaveAlways(tmp_path), (4, 5, 7, 8)
    agent, points, _ = setup.fit(Poison(*skipped), save)
    assert sum(metric(points, "update/skipped_steps")) == 4
    inside = next(file for file in save.files if file.name.startswith("5_1_"))
    for file in (inside, save.last(6)):
        resumed, tail, _ = setup.fit(Poison(*skipped), ckpt_path=str(file))
        assert resumed.skipped == agent.skipped
        assert as_text(points)[-len(tail) :] == as_text(tail) and tail
        for weight, expected in zip(resumed.parameters(), agent.parameters(), strict=True):
            assert torch.equal(weight, expected)
    with pytest.raises(SkippedStepsError):
        setup.fit(Poison(*skipped, 6), ckpt_path=str(save.last(6)), default_root_dir=tmp_path)


def test_a_run_whose_steps_are_all_skipped_ends_and_names_the_layer(setup_of, tmp_path):
    layer = "policy.model.model.layers.0.mlp"
    setup = setup_of(tokens_per_microbatch=150)
    with pytest.raises(SkippedStepsError) as caught:
        setup.fit(Broken(layer=layer, step=5), default_root_dir=tmp_path)
    text = str(caught.value)
    assert "\n" not in text and text.startswith("iteration 2, optimizer step 8: ")
    assert "the optimizer skipped 3 steps in a row; " in text
    assert f"on rank 0, first at the output of {layer} on rank 0 in minibatch 1 of " in text
    file = caught.value.record
    assert file == tmp_path / "bad_batch" / "0002_00008_0.pt"
    step = RecordedStep.read(file)
    assert (step.phase, step.iteration, step.step, step.rank, step.ranks) == ("update", 2, 8, 0, 1)
    assert step.suspect == 0 and len(step.minibatches) > 1 and step.minibatches[-1].ends_step
    assert all(state["cpu"].dtype == torch.uint8 for state in step.random)
    saved = torch.load(file.with_name(step.weights), weights_only=True)
    # those of the run after its fifth step
    agent, _, _ = setup.fit(max_steps=5)
    state = agent.state_dict()
    assert any(name.startswith("policy.") for name in saved["module"])
    for name, weight in saved["module"].items():
        assert torch.equal(weight, state[name]), name


@pytest.mark.parametrize("most", [1, 2])
def test_the_number_of_skipped_steps_in_a_row_is_a_setting(setup_of, tmp_path, most):
    setup = setup_of(max_skipped_steps=most)
    setup.fit(Poison(*range(0, STEPS, 2)[: most - 1]), max_epochs=1)
    with pytest.raises(SkippedStepsError, match=f"optimizer step {most + 3}: .* finite numbers"):
        setup.fit(Poison(*range(3, STEPS)), default_root_dir=tmp_path)


def test_one_percent_of_the_last_thousand_steps_is_too_much():
    skipped = SkippedSteps(limit=3)
    for step in range(1, 5000):
        skipped.note(skipped=step % 150 == 0)
        assert skipped.too_many() is None
    for _ in range(4):
        for spoiled in (True, False, True):
            skipped.note(skipped=spoiled)
    assert skipped.too_many() == "15 of the last 1000 steps"
    restored = SkippedSteps(limit=3)
    restored.load_state_dict(skipped.state_dict())
    assert restored == skipped


class NotANumber:
    """A reward function with an answer that is no number."""

    def __call__(self, trajectories, *, gather) -> None:
        trajectories[2].turns[0].reward_terms["bonus"] = math.nan


def test_a_reward_that_is_not_finite_is_named(setup_of):
    with pytest.raises(NonFiniteError) as caught:
        setup_of(rewards=(NotANumber(),)).fit()
    line = str(caught.value)
    assert (
        f"{__name__}.NotANumber set the term bonus of turn 0 of group 1, member 0, to nan" in line
    )


def test_weights_that_are_not_finite_are_not_saved(setup_of, tmp_path):
    """As after an optimizer that divides by 0."""

    class Spoil(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_) -> None:
            if trainer.global_step == 7:
                with torch.no_grad():
                    next(pl_module.policy.parameters()).flatten()[3] = math.inf

    names = {"filename": "{epoch}", "every_n_train_steps": 2}
    keep = ModelCheckpoint(tmp_path, **names, save_top_k=-1, save_last=True)
    with pytest.raises(NonFiniteError, match=r"first policy\.model\..*: they are not saved"):
        setup_of().fit(Spoil(), keep, enable_checkpointing=True)
    files = sorted(tmp_path.glob("*.ckpt"))
    assert [file.name for file in files][-1] == "last.ckpt" and len(files) == 3
    for file in files:
        state = torch.load(file, weights_only=True)["state_dict"]
        assert all(weight.isfinite().all() for weight in state.values())


def test_a_warm_start_that_makes_nan_ends_and_names_the_layer(setup_of, tmp_path):
    bundle = setup_of().bundle()
    proxy = AgentProxy(
        environments=EnvironmentManager(**FROZENLAKE),
        context=ContextManager(bundle, window=1, system_prompt=None),
        max_response_tokens=16,
    )
    warm_start = WarmStartSettings(episodes=16, batch_size=16, steps=9, gamma=0.9)
    demonstrations = DemonstrationDataModule(
        proxy, policy=NoisyPolicy(noise=0.3), settings=warm_start, seed=0
    )
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)
    module = WarmStartModule(PolicyModule(bundle), None, optimizer=optimizer, settings=warm_start)
    memory, layer = InMemory(), "policy.model.model.layers.0.self_attn"
    settings = {"max_steps": 9, "max_epochs": -1, "enable_checkpointing": False}
    trainer = pl.Trainer(
        **QUIET, **settings, logger=memory, log_every_n_steps=1, default_root_dir=tmp_path,
        callbacks=[Broken(layer=f"{layer}.o_proj", step=2)],
    )  # fmt: skip
    with pytest.raises(SkippedStepsError) as caught:
        trainer.fit(module, datamodule=demonstrations)
    assert str(caught.value).startswith("warm start, optimizer step 5: ")
    assert f"first at the output of {layer}.o_proj on rank 0" in str(caught.value)
    assert caught.value.record == tmp_path / "bad_batch" / "warm_start_00005_0.pt"
    assert RecordedStep.read(caught.value.record).phase == "warm start"
    # a loss that is NaN is logged as NaN
    losses = metric(memory.points, "warm_start/loss")
    assert [math.isnan(loss) for loss in losses] == [False, False, True, True]
    module.check_weights()


class With(pl.Callback):
    """Gives a module another optimizer."""

    def __init__(self, factory: OptimizerFactory) -> None:
        self.factory = factory

    def setup(self, trainer, pl_module, stage) -> None:
        pl_module.optimizer_factory = self.factory


@pytest.mark.parametrize("scale", [65536.0, 1.0])
def test_a_gradient_scale_that_is_lowered_ends_no_run(setup_of, scale):
    """In float16 too large a scale overflows, and the scaler skips steps until it fits."""
    agent, _ = setup_of().build()
    agent.trainer = pl.Trainer(accelerator="cpu", barebones=True, max_epochs=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    agent.trainer.strategy.precision_plugin = MixedPrecision("16-mixed", "cpu", scaler)
    scaler.scale(torch.ones(1))
    optimizer = agent.configure_optimizers()["optimizer"]

    def overflow() -> None:
        next(agent.parameters()).grad = torch.full_like(next(agent.parameters()), math.inf)
        agent.configure_gradient_clipping(optimizer, 1.0)

    for _ in range(2):
        overflow()
    if scale > 1:
        for _ in range(20):
            overflow()
        assert agent.step_metrics() == {"skipped_steps": 22.0}
    else:
        with pytest.raises(SkippedStepsError):
            overflow()


def test_gradients_that_a_fused_optimizer_gets_are_unscaled_and_then_clipped(setup_of):
    """A gradient scaler leaves it to torch's fused optimizers to unscale gradients in their step."""
    norms = {}
    for fused in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
        factory = functools.partial(torch.optim.AdamW, lr=1e-5, fused=fused)
        agent, _, _ = setup_of().fit(With(factory), plugins=plugins, max_epochs=1)
        norms[fused] = agent.step_metrics()["gradient_norm_policy"]
    assert norms[True] == pytest.approx(norms[False], rel=0.01)


def test_the_learning_rate_rises_over_the_first_iterations(setup_of):
    _, points, _ = setup_of(learning_rate_warm_up=2, learning_rate=1e-3).fit()
    # half, then the linear decay to a tenth
    assert metric(points, "update/learning_rate") == pytest.approx([0.5e-3, 0.7e-3, 0.4e-3])
