"""Diagnostics and the collapse monitor in whole runs: values, warning, stop, rollback, mitigation, resume."""

import json
import logging
import math
import shutil
from fnmatch import fnmatchcase

import lightning.pytorch as pl
import pytest
import torch

from ragen_pl.base.constraints import declared_names
from ragen_pl.callbacks.collapse import Alarm, CollapseMonitor
from ragen_pl.callbacks.diagnostics import Diagnostics
from ragen_pl.callbacks.mitigation import Mitigation
from ragen_pl.data.datamodule import RolloutDataModule
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.loops.rollout_update import RolloutUpdate
from ragen_pl.tracking.loggers import RunLogger

FORMAT = {"format": Alarm(diagnostic="valid_actions", below=0.05)}


class Break(RolloutCallback):
    """Callback that zeroes the policy's weights before one rollout and records them after each iteration."""

    def __init__(self, iteration: int = 2) -> None:
        self.iteration = iteration
        self.weights: list[dict[str, torch.Tensor]] = []
        self.steps: list[float] = []
        self.valid: list[float] = []

    def on_rollout_start(self, trainer, pl_module):
        if trainer.current_epoch == self.iteration:
            with torch.no_grad():
                for parameter in pl_module.policy.parameters():
                    parameter.zero_()

    def on_train_epoch_end(self, trainer, pl_module):
        self.weights.append({n: v.clone() for n, v in pl_module.state_dict().items()})
        state = next(iter(trainer.optimizers[0].state.values()))
        self.steps.append(float(state["step"]))
        self.valid.append(trainer.datamodule.metrics["valid_actions"])


def monitor(*actions, **settings):
    return CollapseMonitor(
        **({"alarms": FORMAT, "actions": actions, "grace": 0, "cooldown": 1, "good_every_n_iterations": 1} | settings)
    )  # fmt: skip


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


def run(setup_of, folder, *callbacks, epochs=4, **changes):
    """Run iterations without validations, of which the callbacks read nothing."""
    setup = setup_of(trainer={"default_root_dir": str(folder), "limit_val_batches": 0})
    return setup.fit(*callbacks, max_epochs=epochs, **changes)


def test_diagnostics_are_logged_and_leave_weights_unchanged(setup_of, tmp_path):
    plain, _, _ = run(setup_of, tmp_path)
    read, points, _ = run(
        setup_of, tmp_path, Diagnostics(probe_every_n_iterations=2, prompts=4, first=1)
    )
    assert same(plain.state_dict(), read.state_dict())
    logged = [
        {name.removeprefix("diagnostics/"): value for name, value in point.items()}
        for _, point in points
        if "diagnostics/entropy" in point
    ]
    assert len(logged) == 4
    wanted = (
        "return", "deviation", "entropy", "think_tokens", "think_blocks", "distinct_responses", "action_entropy",
        "gradient_norm_policy", "gradient_norm_critic",
    )  # fmt: skip
    assert all(name in point for point in logged for name in wanted)
    taken = {name for _, point in points for name in point if name.startswith("diagnostics/")}
    known = [name.removeprefix("diagnostics/") for name in taken]
    declared = declared_names("DIAGNOSTICS")
    assert not [
        name for name in known if not any(fnmatchcase(name, pattern) for pattern in declared)
    ]
    # Between probes, the last probe is logged.
    information = [point["mutual_information"] for point in logged]
    assert information[0] == information[1] != information[2] == information[3]
    first = logged[0]
    assert first["mutual_information_bound"] == pytest.approx(math.log(4), abs=1e-6)
    assert first["mutual_information"] <= first["mutual_information_bound"]
    assert "entropy_ratio" not in first and "gradient_spike_policy" not in logged[1]
    assert logged[3]["entropy_ratio"] == pytest.approx(logged[3]["entropy"] / first["entropy"])
    norms = [point["gradient_norm_policy"] for point in logged]
    assert logged[2]["gradient_spike_policy"] == pytest.approx(
        norms[2] / ((norms[0] + norms[1]) / 2)
    )


class SilentEngine(TransformersEngine):
    """Reports no entropies, as vLLM does."""

    def collect(self, *, wait=True):
        found = super().collect(wait=wait)
        for _, generation in found:
            generation.entropy = None
        return found


def test_entropy_is_the_trainers_where_the_engine_reports_none(setup_of, tmp_path):
    def entropies(**changes):
        setup = setup_of(trainer={"default_root_dir": str(tmp_path)}, **changes)
        _, points, _ = setup.fit(Diagnostics(prompts=0), max_epochs=2, limit_val_batches=0)
        logged = [point for _, point in points if "diagnostics/entropy" in point]
        return [point["diagnostics/entropy"] for point in logged]

    reported, own = entropies(), entropies(engine=SilentEngine)
    assert len(own) == 2 and own == pytest.approx(reported, rel=0.2)


def test_think_accuracy_is_compared_with_the_first_iteration(setup_of, tmp_path):
    class Thoughts(pl.Callback):
        """Set the share of true thoughts that an environment with `describe()` would report."""

        def on_train_epoch_end(self, trainer, pl_module):
            trainer.datamodule.metrics["think_accuracy"] = (0.8, 0.6, 0.2, 0.2)[
                trainer.current_epoch
            ]

    watch = monitor(
        "warn", alarms={"think_accuracy": Alarm(diagnostic="think_accuracy_ratio", below=0.5)}
    )
    _, points, _ = run(setup_of, tmp_path, Thoughts(), Diagnostics(prompts=0, first=5), watch)
    name = "diagnostics/think_accuracy_ratio"
    assert [point[name] for _, point in points if name in point] == pytest.approx(
        [0.75, 0.25, 0.25]
    )
    assert [event["iteration"] for event in watch.events] == [3]


def test_resumed_run_ends_with_the_same_diagnostics(setup_of, tmp_path):
    """Including diagnostics from before the checkpoint, wherever it was written."""

    class Save(RolloutCallback):
        def on_rollout_end(self, trainer, *args):
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "rollout.ckpt")

        def on_train_epoch_end(self, trainer, *args):
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "iteration.ckpt")

    def read(*callbacks, **changes):
        diagnostics = Diagnostics(probe_every_n_iterations=10, prompts=4, first=1)
        _, _, trainer = run(setup_of, tmp_path, diagnostics, *callbacks, epochs=3, **changes)
        return {n: float(v) for n, v in trainer.callback_metrics.items() if "diagnostics" in n}

    whole = read(Save())
    assert "diagnostics/mutual_information" in whole
    for name in ("rollout", "iteration"):
        assert read(ckpt_path=str(tmp_path / f"{name}.ckpt")) == whole, name


@pytest.mark.parametrize("renames", [True, False])
def test_actions_that_are_too_many_over_the_run_have_no_metric_each(setup_of, tmp_path, renames):
    """As free texts, each of which is another action. None counts as one that is never taken."""

    class Actions(RolloutCallback):
        def on_rollout_end(self, trainer, pl_module, trajectories):
            turns = [turn for trajectory in trajectories for turn in trajectory.turns]
            iteration = trainer.current_epoch
            count = 9 if iteration == 2 and not renames else 3
            for number, turn in enumerate(turns):
                turn.actions = [f"{iteration % 3 if renames else 0} {number % count}"]
            if trainer.current_epoch == 3:
                trainer.save_checkpoint(tmp_path / "rollout.ckpt")

    def logged(**changes):
        diagnostics = Diagnostics(prompts=0)
        _, points, trainer = run(setup_of, tmp_path, Actions(), diagnostics, epochs=5, **changes)
        points = [point for _, point in points if "diagnostics/entropy" in point]
        names = [sum("diagnostics/action/" in name for name in point) for point in points]
        return names, any("diagnostics/action/" in name for name in trainer.callback_metrics)

    assert logged() == ([3, 6 if renames else 3, 0, 0, 0], False)
    assert logged(ckpt_path=str(tmp_path / "rollout.ckpt")) == ([0, 0], False)


def test_warning_names_the_diagnostic_and_the_run_continues(setup_of, tmp_path, caplog):
    broken, watch = Break(), monitor("warn")
    with caplog.at_level(logging.WARNING, logger="ragen_pl"):
        _, points, trainer = run(setup_of, tmp_path, Diagnostics(prompts=0), broken, watch)
    assert "iteration 3, collapse? format: valid_actions 0, below 0.05 (warned)" in caplog.text
    assert trainer.current_epoch == 4 and not (tmp_path / "good.ckpt").exists()
    assert [point["collapse/events"] for _, point in points if "collapse/events" in point] == [
        0,
        0,
        1,
        1,
    ]
    (event,) = map(json.loads, (tmp_path / "collapse.jsonl").read_text().splitlines())
    assert (event["iteration"], event["alarms"], event["done"]) == (3, ["format"], ["warned"])
    assert event["diagnostics"] == {"valid_actions": 0.0}


def test_stop_ends_the_run_after_the_iteration(setup_of, tmp_path):
    _, _, trainer = run(
        setup_of, tmp_path, Diagnostics(prompts=0), Break(), monitor("stop"), epochs=6
    )
    assert trainer.current_epoch == 3


def test_rollback_restores_weights_and_optimizer_and_continues(setup_of, tmp_path, monkeypatch):
    dropped = []
    monkeypatch.setattr(RolloutDataModule, "drop_ahead", lambda self: dropped.append(self))
    broken, after = Break(), Break(iteration=-1)
    watch = monitor("rollback")
    agent, _, trainer = run(setup_of, tmp_path, Diagnostics(prompts=0), broken, watch, after)
    assert watch.good is not None and watch.rollbacks == 1
    assert "rolled weights and optimizer back to iteration 2" in watch.events[0]["done"]
    assert len(dropped) == 1
    assert broken.valid[2] == 0.0 and broken.valid[1] > 0.05
    # In each iteration, `broken` is called before the monitor and `after` after it.
    assert not same(broken.weights[2], broken.weights[1])
    assert same(after.weights[2], broken.weights[1]) and after.steps[2] == broken.steps[1]
    assert broken.valid[3] > 0.05 and trainer.current_epoch == 4
    assert not same(agent.state_dict(), broken.weights[1])


def test_a_run_that_goes_back_takes_neither_a_later_good_state_nor_later_events(setup_of, tmp_path):
    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer, *args):
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "first.ckpt")

    after = Break(iteration=-1)
    whole = monitor("rollback")
    run(setup_of, tmp_path, Diagnostics(prompts=0), whole, after, Save(), epochs=2)
    assert whole.good == 2
    (tmp_path / "collapse.jsonl").write_text(json.dumps({"iteration": 2}) + "\n")
    again, watch = Break(iteration=-1), monitor("rollback")
    run(
        setup_of, tmp_path, Diagnostics(prompts=0), Break(1), watch, again,
        epochs=2, ckpt_path=str(tmp_path / "first.ckpt"),
    )  # fmt: skip
    (event,) = map(json.loads, (tmp_path / "collapse.jsonl").read_text().splitlines())
    none = "found no good state to roll back to: good.ckpt has iteration 2, not 1"
    assert (event["iteration"], event["done"]) == (2, [none])
    assert not same(again.weights[-1], after.weights[-1]) and watch.rollbacks == 0


def test_rollback_keeps_the_learning_rate_of_schedule_and_mitigation(setup_of, tmp_path):
    class Rates(pl.Callback):
        def __init__(self):
            self.rates = []

        def on_train_batch_start(self, trainer, *args):
            self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def rates(*callbacks):
        seen = Rates()
        run(setup_of, tmp_path, Diagnostics(prompts=0), *callbacks, seen)
        return seen.rates

    plain = rates()
    assert len(set(plain)) == 4  # it falls with each iteration
    assert rates(Break(), monitor("rollback", cooldown=9)) == plain
    slower = Mitigation(clip_high=None, learning_rate_factor=0.5)
    mitigated = rates(Break(), monitor("rollback", "mitigate", mitigation=slower, cooldown=9))
    before = 3 * len(plain) // 4  # the alarm is in the third of four
    assert mitigated == pytest.approx(plain[:before] + [0.5 * rate for rate in plain[before:]])


def test_rollbacks_are_limited(setup_of, tmp_path):
    class Always(Break):
        def on_rollout_start(self, trainer, pl_module):
            self.iteration = max(1, trainer.current_epoch)
            super().on_rollout_start(trainer, pl_module)

    watch = monitor("rollback", max_rollbacks=1, cooldown=0)
    _, _, trainer = run(setup_of, tmp_path, Diagnostics(prompts=0), Always(), watch, epochs=6)
    assert [event["iteration"] for event in watch.events] == [2, 3] and trainer.current_epoch == 3
    assert watch.events[1]["done"] == ["stopped the run after 1 rollbacks"]


MITIGATION = Mitigation(
    clip_high=0.4,
    kl_coefficient=0.0,
    entropy_target=50.0,
    entropy_rate=1e-4,
    max_entropy_coefficient=0.01,
    learning_rate_factor=0.5,
)


def test_mitigation_switches_settings_and_survives_a_resume(setup_of, tmp_path):
    def watched(**changes):
        checkpoint = pl.callbacks.ModelCheckpoint(
            dirpath=tmp_path, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True
        )
        watch = monitor("mitigate", mitigation=MITIGATION)
        agent, _, trainer = run(
            setup_of, tmp_path, Diagnostics(prompts=2), Break(1), watch, checkpoint,
            enable_checkpointing=True, **changes,
        )  # fmt: skip
        return agent, watch, trainer

    agent, watch, trainer_of_whole = watched()
    assert agent.loss.policy.clip_high == 0.4 and agent.loss.kl.coefficient == 0.0
    assert 0.0 < agent.loss.entropy_coefficient <= 0.01
    rate = 3e-3 * 0.5 * agent.optimization.learning_rate_end  # at the schedule's end
    assert trainer_of_whole.optimizers[0].param_groups[0]["lr"] == pytest.approx(rate)
    (done,) = watch.events[0]["done"]
    assert "clip_high 0.2 -> 0.4" in done and "kl_coefficient 0.1 -> 0.0" in done
    assert "learning_rate times 0.5" in done
    files = sorted(tmp_path.glob("epoch=?.ckpt"))
    resumed, again, trainer = watched(ckpt_path=str(files[2]))
    assert trainer.current_epoch == 4 and again.events == watch.events
    assert resumed.loss.policy.clip_high == 0.4
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(rate)
    assert resumed.loss.entropy_coefficient == agent.loss.entropy_coefficient
    assert same(agent.state_dict(), resumed.state_dict())


def test_mitigation_switches_a_penalty_on_if_there_is_a_reference(setup_of, tmp_path):
    watch = monitor("mitigate", mitigation=Mitigation(clip_high=None, kl_coefficient=0.5))
    trainer = {"default_root_dir": str(tmp_path), "limit_val_batches": 0}
    setup = setup_of(trainer=trainer, kl={"coefficient": 0.0})
    _, points, _ = setup.fit(Diagnostics(prompts=0), Break(1), watch, max_epochs=4)
    kl = [point["update/reference_kl"] for _, point in points if "update/reference_kl" in point]
    assert len(kl) == 2 and all(value > 0 for value in kl)  # after iteration 2

    agent, _ = setup_of().build()
    agent.loss.kl = None
    with pytest.raises(ValueError, match=r"mitigation.kl_coefficient=0.5: .* no reference policy"):
        watch.mitigation.check(pl.Trainer(barebones=True, accelerator="cpu"), agent)


@pytest.mark.parametrize(
    ("mitigation", "message"),
    [
        (Mitigation(clip_high=None), "all of clip_high, .* are null; set one of them"),
        (Mitigation(clip_high=0.1), "mitigation.clip_high=0.1: the loss's own bound is 0.2"),
        (Mitigation(clip_high=4.0), "mitigation.clip_high=4: the loss's own bound is 0.2"),
    ],
)
def test_useless_or_harmful_mitigation_is_rejected(setup_of, mitigation, message):
    agent, _ = setup_of().build()
    with pytest.raises(ValueError, match=message):
        mitigation.check(pl.Trainer(barebones=True, accelerator="cpu"), agent)


def test_mitigation_switches_the_group_filter(setup_of, tmp_path):
    trainer = pl.Trainer(barebones=True, accelerator="cpu")
    agent, datamodule = setup_of().build()
    kept = object()
    mitigation = Mitigation(clip_high=None, group_filter=kept)
    trainer.datamodule = pl.LightningDataModule()
    with pytest.raises(ValueError, match="has no group_filter; set null"):
        mitigation.check(trainer, agent)
    trainer.datamodule = datamodule
    mitigation.check(trainer, agent)
    assert list(mitigation.switch_on(trainer, agent)) == ["group_filter"]
    assert datamodule.group_filter is kept


@pytest.mark.slow
def test_events_are_logged_to_mlflow(setup_of, tmp_path, empty_store):
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    logger = RunLogger(run_dir=str(tmp_path / "run"), root=str(tmp_path))
    setup = setup_of(trainer={"default_root_dir": str(tmp_path / "run")})
    agent, datamodule = setup.build()
    trainer = pl.Trainer(
        max_epochs=3, logger=logger, accelerator="cpu", enable_progress_bar=False, log_every_n_steps=1,
        enable_checkpointing=False, enable_model_summary=False, limit_val_batches=0, default_root_dir=tmp_path / "run",
        callbacks=[RolloutUpdate(), Diagnostics(prompts=4), Break(), monitor("warn")],
    )  # fmt: skip
    trainer.fit(agent, datamodule=datamodule)
    client, run = logger.experiment, logger.run_id
    kept = client.get_run(run).data
    assert "valid_actions 0, below 0.05 (warned)" in kept.tags["collapse.3"]
    assert kept.tags["diagnostics.regime"] and kept.metrics["collapse/events"] == 1.0
    assert kept.metrics["diagnostics/mutual_information_bound"] == pytest.approx(math.log(4))
    assert [artifact.path for artifact in client.list_artifacts(run, "collapse")] == [
        "collapse/collapse.jsonl"
    ]


class PoisonGradient(pl.Callback):
    """Make a gradient NaN in one optimizer step."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == 9:
            next(w for w in pl_module.parameters() if w.grad is not None).grad.fill_(math.nan)


def test_a_gradient_that_is_not_finite_is_a_spike(setup_of, tmp_path):
    alarms = {"gradient": Alarm(diagnostic="gradient_spike", above=20.0)}
    watch, diagnostics = monitor("warn", alarms=alarms), Diagnostics(prompts=0)
    _, points, _ = run(setup_of, tmp_path, diagnostics, PoisonGradient(), watch)
    (event,) = watch.events
    assert event["iteration"] == 3 and event["message"] == "gradient: gradient_spike inf, above 20"
    # the file is JSON, which has no infinity
    line = (tmp_path / "collapse.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail)["diagnostics"] == {"gradient_spike": None}
    # the norm is logged as it was, and no later one is compared with it
    norms = [point["update/gradient_norm_policy"] for _, point in points if "update/loss" in point]
    assert [math.isnan(norm) for norm in norms] == [False, False, True, False]
    assert diagnostics.values["gradient_spike"] < 20
    assert diagnostics._norms["policy"] == [norms[0], norms[1], norms[3]]


def test_alarm_depends_on_limit_patience_grace_and_success():
    alarm = Alarm(diagnostic="entropy", below=0.1, max_success=0.8)
    assert alarm.holds({"entropy": 0.05}) and not alarm.holds({"entropy": 0.1})
    assert not alarm.holds({"entropy": 0.05, "success": 0.8}) and not alarm.holds({})
    assert alarm.holds({"entropy": math.nan, "success": 0.9})
    watch = CollapseMonitor(alarms={"a": Alarm(diagnostic="x", above=1.0, patience=2)})
    readings = [{"x": 2.0}, {}, {"x": 2.0}, {"x": 0.5}, {"x": 2.0}, {"x": 3.0}]
    tripped = [
        watch._count(["a"] if values.get("x", 0) > 1 else [], values, quiet=False)
        for values in readings
    ]
    assert tripped == [[], [], ["a"], [], [], ["a"]]
    assert watch._count(["a"], {"x": 2.0}, quiet=True) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "found below=null and above=null, expected one of below and above"),
        ({"below": 0.1, "above": 0.2}, "found below=0.1 and above=0.2, expected one of"),
        ({"below": 0.1, "patience": 0}, "patience=0: expected a whole number, at least 1"),
    ],
)
def test_alarm_needs_exactly_one_limit_and_patience(settings, message):
    with pytest.raises(ValueError, match=message):
        Alarm(diagnostic="entropy", **settings)


def test_monitor_needs_diagnostics_before_it(setup_of, tmp_path):
    with pytest.raises(ValueError, match="the values of Diagnostics: put"):
        run(setup_of, tmp_path, monitor("warn"), Diagnostics())
