"""A run resumed from a checkpoint of any hook ends with the bits of the uninterrupted run."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from support.models.copy_engine import CopyEngine

from ragen_pl.algorithms.advantages.group import GroupRelative, LeaveOneOut
from ragen_pl.algorithms.group_filter import AboveDeviation, GroupFilter
from ragen_pl.algorithms.normalization import RewardNormalizer, Running
from ragen_pl.callbacks.record_batches import RecordBatches
from ragen_pl.checkpoints.rank_states import RankStatesError
from ragen_pl.data.opponents import Opponents
from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.modules.reference import MovingAverage
from ragen_pl.rewards.shaping import WeightTerms

Choice = Callable[[list[Path]], list[Path]]
POINTS = (
    "on_train_start",
    "on_rollout_start",
    "on_rollout_progress",
    "on_rollout_end",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
)


class SaveAt(RolloutCallback):
    """Write a checkpoint in each of the given hooks."""

    def __init__(self, folder: Path, points: tuple[str, ...]) -> None:
        self.folder = folder
        for point in points:
            setattr(self, point, self._saver(point))
        self.files: list[Path] = []
        # number of points logged before each file
        self.logged: list[int] = []

    def _saver(self, point: str):
        def save(trainer: pl.Trainer, *args: object) -> None:
            name = f"{len(self.files):03d}_{point}_{trainer.current_epoch}_{trainer.global_step}"
            self.files.append(self.folder / f"{name}.ckpt")
            self.logged.append(len(trainer.logger.points))
            trainer.save_checkpoint(self.files[-1])

        return save


def differences(module: torch.nn.Module, other: torch.nn.Module) -> list[str]:
    expected = other.state_dict()
    return [n for n, value in module.state_dict().items() if not torch.equal(value, expected[n])]


def counts(trainer: pl.Trainer) -> tuple[int, int, int]:
    """Return iterations, optimizer steps, and steps as Lightning's loggers count them."""
    return (
        trainer.current_epoch,
        trainer.global_step,
        trainer.fit_loop.epoch_loop._batches_that_stepped,
    )


def every(number: int) -> Choice:
    """Return a function that chooses each `number`-th checkpoint, the first among them."""
    return lambda files: files[::number]


def one_of_each_hook(files: list[Path]) -> list[Path]:
    """Choose one checkpoint of each hook, of different iterations."""
    names = [file.name[4:].rsplit("_", 2)[0] for file in files]
    of_hooks = [
        [file for file, name in zip(files, names, strict=True) if name == point] for point in POINTS
    ]
    return [of_hook[number % len(of_hook)] for number, of_hook in enumerate(of_hooks)]


def text(points: list) -> list[str]:
    """Return points as text, in which a NaN equals itself; metrics of a later iteration may come first."""
    return [f"{step} {sorted(metrics.items())}" for step, metrics in points]


def resume_everywhere(setup, folder: Path, points: tuple[str, ...], *, chosen: Choice) -> int:
    """Resume from some checkpoints of a run and compare weights and logged points.

    The resumed runs write no checkpoints, so that they also show that writing them changes nothing.
    """
    saver = SaveAt(folder, points)
    agent, logged, reference = setup.fit(saver)
    files, wrong = chosen(saver.files), []
    for file in files:
        before = saver.logged[saver.files.index(file)]
        resumed, tail, trainer = setup.fit(ckpt_path=str(file))
        changed = differences(agent, resumed)
        # the validation of the untrained policy, the first point, is not repeated
        remaining = len(logged) - max(1, before)
        # an iteration's metrics are logged after its epoch-end hooks, and by the interrupted run alone
        remaining -= "on_train_epoch_end" in file.name
        same = len(tail) >= remaining and text(tail) == text(logged[len(logged) - len(tail) :])
        if changed or not same or counts(trainer) != counts(reference):
            wrong.append((file.name, len(changed), len(tail), counts(trainer)))
    assert wrong == []
    return len(files)


def test_resuming_from_any_hook_is_exact(setup_of, tmp_path):
    assert resume_everywhere(setup_of(), tmp_path, POINTS, chosen=one_of_each_hook) == len(POINTS)


def test_resuming_after_any_validation_is_exact(setup_of, tmp_path):
    """Those before the first iteration and of the last weights too: none is repeated."""
    setup = setup_of(trainer={"max_epochs": 2})
    assert resume_everywhere(setup, tmp_path, ("on_validation_end",), chosen=every(1)) == 3


def test_resuming_a_run_that_steps_limit_is_exact(setup_of, tmp_path):
    """Its last iteration is cut after two of four minibatches."""
    setup = setup_of(trainer={"max_epochs": -1, "max_steps": 6})
    points = ("on_rollout_end", "on_validation_end", "on_train_epoch_end")
    assert resume_everywhere(setup, tmp_path, points, chosen=every(1)) == 7


class StopAfter(pl.Callback):
    """End a run inside an update, as a limit of time does."""

    def __init__(self, minibatches: int) -> None:
        self.minibatches = minibatches

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        trainer.should_stop = trainer.fit_loop.total_batch_idx + 1 == self.minibatches


@pytest.mark.parametrize(
    ("changes", "limit", "stops"),
    [({}, {"max_steps": 6}, ()), ({"accumulate_grad_batches": 2}, {}, (StopAfter(11),))],
    ids=["steps", "time"],
)
def test_a_run_that_was_ended_inside_an_iteration_goes_on_with_it(
    setup_of, tmp_path, changes, limit, stops
):
    setup = setup_of(dropout=0.1, trainer={"max_epochs": 2} | changes)
    agent, logged, reference = setup.fit()
    saver = SaveAt(tmp_path, ("on_train_epoch_end", "on_train_end"))
    _, _, cut = setup.fit(saver, *stops, **limit)
    assert cut.current_epoch == 1 and cut.global_step < reference.global_step
    for file in saver.files[-2:]:
        resumed, tail, trainer = setup.fit(ckpt_path=str(file))
        assert differences(resumed, agent) == [] and counts(trainer) == counts(reference)
        assert repr(tail) == repr(logged[-len(tail) :]) and "rollout/return" in repr(tail)


def test_resuming_with_all_kinds_of_state_is_exact(setup_of, tmp_path):
    """Dropout, a separate critic, whole conversations, a filter, running statistics, a moving reference, and
    checkpoints inside an optimizer step.
    """
    setup = setup_of(
        group_filter=GroupFilter(keep=AboveDeviation(), resample=1, reweight=0.5),
        normalizer=lambda: RewardNormalizer(by=Running(decay=0.5), clip_high=2.0),
        kl={"reference": MovingAverage(decay=0.5)},
        dropout=0.1,
        own_critic=True,
        window="all",
        trainer={"accumulate_grad_batches": 2},
    )
    assert resume_everywhere(setup, tmp_path, ("on_train_batch_end",), chosen=every(7)) == 4


def test_resuming_games_against_a_pool_of_snapshots_is_exact(setup_of, tmp_path):
    setup = setup_of(
        opponents=lambda: Opponents(every=1, size=2, rule="squared", floor=0.5),
        estimator=LeaveOneOut(),
    )
    points = ("on_rollout_progress", "on_rollout_end", "on_train_batch_end")
    assert resume_everywhere(setup, tmp_path, points, chosen=every(5)) >= 4
    _, logged, _ = setup.fit()
    rates = {name for _, metrics in logged for name in metrics if "win_rate" in name}
    assert "rollout/opponent_win_rate" in rates and len(rates) > 1


def test_resuming_a_mixture_of_environments_is_exact(setup_of, tmp_path):
    """Its schedule, the curriculum of one environment, and running statistics of the returns of each."""
    setup = setup_of(
        mixed=True,
        normalizer=lambda: RewardNormalizer(by=Running(decay=0.5), clip_high=2.0),
        tokens_per_microbatch=150,
    )
    points = ("on_rollout_end", "on_train_batch_end", "on_validation_end")
    assert resume_everywhere(setup, tmp_path, points, chosen=every(11)) >= 3
    _, logged, _ = setup.fit(max_epochs=1)
    names = {name for _, metrics in logged for name in metrics}
    assert {"val/lake/success", "val/bandit/success", "rollout/bandit/return"} <= names
    assert {"val/success", "rollout/lake/curriculum_stage"} <= names
    assert "rollout/return" not in names


def test_resuming_between_microbatches_is_exact(setup_of, tmp_path):
    """Their number differs between iterations, and the Trainer's accumulation with it; some ids are not sampled, and
    the penalty's gradient is clipped by itself.
    """
    setup = setup_of(
        tokens_per_microbatch=150,
        dropout=0.1,
        truncation={"top_p": 0.9, "top_k": 20},
        kl={"clip_norm": 0.1},
    )
    assert resume_everywhere(setup, tmp_path, ("on_train_batch_end",), chosen=every(9)) >= 4


def test_weights_name_the_settings_of_their_start(setup_of, tmp_path):
    saver = SaveAt(tmp_path, ("on_train_batch_end",))
    for name in ("config.yaml", "config_2.yaml", "config_10.yaml", "config_x.yaml"):
        (tmp_path / name).touch()
    setup_of().fit(
        saver, RecordBatches(every_n_iterations=1), max_steps=1, default_root_dir=tmp_path
    )
    for file in (saver.files[0], *tmp_path.glob("batches/*_weights.pt")):
        assert torch.load(file, weights_only=True)["settings"] == "config_10.yaml"
    assert len(list(tmp_path.glob("batches/*_weights.pt"))) == 1


def test_samples_of_another_number_of_ranks_are_refused(setup_of):
    _, datamodule = setup_of().build()
    state = datamodule.state_dict() | {"buffers": [{}, {}]}
    with pytest.raises(
        RankStatesError, match="inside an update on 2 ranks and cannot continue on 1"
    ):
        datamodule.load_state_dict(state)


@pytest.mark.slow
def test_resuming_with_a_rollout_ahead_is_exact(setup_of, tmp_path):
    """Also where more groups are sampled with present weights, and rewards are changed in place."""
    setup = setup_of(
        iterations_ahead=1,
        engine=CopyEngine,
        group_filter=GroupFilter(keep=AboveDeviation(), resample=1, reweight=0.5),
        rewards=(WeightTerms(turn=0.5, final=0.5),),
    )
    assert resume_everywhere(setup, tmp_path, POINTS, chosen=every(17)) >= 4


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.bfloat16, "kl": {"reference": MovingAverage(decay=0.5)}},
        {"lora": {"r": 2}, "dtype": torch.bfloat16},
        {"lora": {"r": 2}, "own_critic": True, "kl": {"reference": MovingAverage(decay=0.5)}},
        {"trainer": {"precision": "bf16-mixed"}},
    ],
    ids=["bfloat16", "lora", "lora average", "mixed"],
)
def test_resuming_with_master_weights_and_adapters_is_exact(setup_of, tmp_path, changes):
    setup, points = setup_of(**changes), ("on_train_batch_end",)
    setup.trainer = {"max_epochs": 2} | setup.trainer
    assert resume_everywhere(setup, tmp_path, points, chosen=every(5)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"estimator": GroupRelative(), "trainer": {"check_val_every_n_epoch": 2}},
        {"own_critic": True, "dropout": 0.1, "trainer": {"accumulate_grad_batches": 2}},
        {"window": "all", "frozenlake": {"turn_limit_bootstraps": True}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_resuming_any_kind_of_run_is_exact(setup_of, tmp_path, changes):
    """Resume from each thirteenth checkpoint. Which hooks those are depends on the number of steps."""
    assert resume_everywhere(setup_of(**changes), tmp_path, POINTS, chosen=every(13)) >= 5


@pytest.mark.parametrize(
    "changes", [{"seed": 7}, {"minibatches": 5}, {"tokens_per_microbatch": 64}], ids=str
)
def test_an_update_under_way_ends_with_its_own_minibatches(setup_of, changes, tmp_path):
    """Each of its samples is trained once an epoch, whatever the seed and the sizes of the next updates are."""

    class Samples(RolloutCallback):
        def __init__(self, *, stops: bool) -> None:
            self.stops, self.seen = stops, []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, *_) -> None:
            if trainer.current_epoch == 1:
                rows = batch.samples.select(torch.where(batch.samples.weight > 0)[0])
                self.seen += [int(numbers.max()) for numbers in rows.token]
                if self.stops:
                    trainer.save_checkpoint(tmp_path / "inside.ckpt")
                    raise KeyboardInterrupt

    setup = setup_of(window="all")
    before, after = Samples(stops=True), Samples(stops=False)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        setup.fit(before)
    build = setup.build

    def rebuilt():
        agent, datamodule = build()
        datamodule.seed = changes.get("seed", datamodule.seed)
        sizes = {name: value for name, value in changes.items() if name != "seed"}
        datamodule.update = dataclasses.replace(datamodule.update, **sizes)
        return agent, datamodule

    setup.build = rebuilt
    setup.fit(after, ckpt_path=str(tmp_path / "inside.ckpt"))
    counts = Counter(before.seen + after.seen)
    assert before.seen and after.seen and set(counts.values()) == {2}
