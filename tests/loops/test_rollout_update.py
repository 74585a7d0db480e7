"""The rollout/update loop: order of phases, requirements on the DataModule, private names of Lightning."""

from __future__ import annotations

import dataclasses

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loops import fit_loop, loop, progress, training_epoch_loop

from envs.policies import RandomPolicy
from ragen_pl.algorithms.advantages.bilevel import BilevelGAE
from ragen_pl.algorithms.advantages.group import GroupRelative
from ragen_pl.data.validation import ValidationSet
from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.protocol import Generation
from ragen_pl.loops import rollout_update
from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.loops.rollout_update import RolloutUpdate, RolloutUpdateLoop
from ragen_pl.rollout.scripted import ScriptedResponder


class HookRecorder(RolloutCallback):
    """Record the hooks called, with the iteration and the module's mode."""

    def __init__(self, *hooks: str) -> None:
        self.entries: list[tuple[str, int, bool]] = []
        for hook in hooks:
            setattr(self, hook, self._recorder(hook))

    def _recorder(self, hook: str):
        def record(trainer: pl.Trainer, module: pl.LightningModule, *args: object) -> None:
            self.entries.append((hook, trainer.current_epoch, module.training))

        return record


def trainer_of(*callbacks: pl.Callback) -> pl.Trainer:
    """Return a Trainer of one iteration without logger, checkpoints and progress bar."""
    return pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, max_epochs=1, callbacks=list(callbacks),
    )  # fmt: skip


def test_an_iteration_is_a_rollout_an_update_and_a_validation(setup_of):
    hooks = (
        "on_validation_start",
        "on_rollout_start",
        "on_rollout_end",
        "on_train_epoch_start",
        "on_train_batch_start",
        "on_train_epoch_end",
    )
    recorder = HookRecorder(*hooks)
    setup_of().fit(recorder, max_epochs=2)
    iteration = [
        ("on_rollout_start", False),
        ("on_rollout_end", False),
        ("on_train_epoch_start", True),
        # 2 epochs of 2 minibatches
        *[("on_train_batch_start", True)] * 4,
        ("on_validation_start", False),
        ("on_train_epoch_end", True),
    ]
    # the validation of the untrained policy
    expected = [("on_validation_start", 0, False)]
    expected += [(hook, number, mode) for number in range(2) for hook, mode in iteration]
    assert recorder.entries == expected


def test_a_rollout_holds_no_gradients(setup_of):
    held: dict[str, int] = {}

    class Counter(RolloutCallback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: object):
            self.count("update", module)

        def on_rollout_start(self, trainer: pl.Trainer, module: pl.LightningModule):
            self.count("rollout", module)

        def count(self, phase: str, module: pl.LightningModule):
            number = sum(weight.grad is not None for weight in module.parameters())
            held[phase] = held.get(phase, 0) + number

    # Lightning itself drops them before a validation
    setup_of().fit(Counter(), max_epochs=2, limit_val_batches=0)
    assert held["update"] > 0 and held["rollout"] == 0


def test_validate_first_false_skips_the_validation_of_the_untrained_policy(setup_of):
    agent, datamodule = setup_of().build()
    recorder = HookRecorder("on_validation_start")
    trainer = trainer_of(RolloutUpdate(validate_first=False), recorder)
    trainer.fit(agent, datamodule=datamodule)
    assert len(recorder.entries) == 1


def test_steps_and_iterations_are_counted_as_lightning_does(setup_of):
    _, _, trainer = setup_of(trainer={"accumulate_grad_batches": 2}).fit()
    assert trainer.current_epoch == 3
    assert trainer.global_step == 3 * 2 * 2


def test_microbatches_of_a_token_budget_train_alike(setup_of):
    """One backward pass for each; the optimizer's steps and the metrics stay those of the minibatches."""
    runs = []
    for tokens in (None, 120):
        batches = HookRecorder("on_train_batch_start")
        agent, points, trainer = setup_of(tokens_per_microbatch=tokens).fit(batches, max_epochs=1)
        assert trainer.global_step == 4 and trainer.accumulate_grad_batches == 1
        update = [point for _, point in points if "update/loss" in point]
        runs.append((len(batches.entries), dict(agent.named_parameters()), update))
    (steps, weights, whole), (more_steps, other_weights, parts) = runs
    assert steps == 4 and more_steps >= 12
    for name, weight in weights.items():
        torch.testing.assert_close(weight, other_weights[name], rtol=1e-4, atol=1e-5)
    names = [name for name in whole[0] if name.startswith("update/")]
    for name in names:
        assert parts[0][name] == pytest.approx(whole[0][name], rel=1e-3, abs=1e-5), name


def test_a_trainer_has_its_own_accumulation_after_an_error(setup_of):
    class Fails(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            assert trainer.accumulate_grad_batches > 1
            raise LookupError("raised by a test")

    agent, datamodule = setup_of(tokens_per_microbatch=120).build()
    trainer = trainer_of(RolloutUpdate(), Fails())
    with pytest.raises(LookupError):
        trainer.fit(agent, datamodule=datamodule)
    assert trainer.accumulate_grad_batches == 1


def test_a_sample_over_the_token_budget_is_reported(setup_of, caplog):
    setup_of(tokens_per_microbatch=4).fit(max_epochs=1)
    (message,) = {record.message for record in caplog.records if "microbatch" in record.message}
    assert message.startswith("update.tokens_per_microbatch=4: ")
    assert message.endswith("tokens; each is a microbatch of its own")


def test_a_validation_set_in_the_environments_of_training_keeps_its_episodes(setup_of):
    _, datamodule = setup_of().build()
    validation_set = ValidationSet("held_out", datamodule.proxy, episodes=6)
    before = validation_set.state_keys()
    datamodule.validation_sets, datamodule.held_out = [validation_set], True
    datamodule.setup("fit")
    assert validation_set.state_keys() == before
    assert datamodule.proxy.environments.held_out == frozenset(before)


def test_weights_are_loaded_once_for_a_rollout_and_once_for_a_validation(setup_of, monkeypatch):
    """However many batches a validation has: with sharded weights all ranks load together."""
    versions = []
    load = TransformersEngine.load_weights

    def noted(engine, version):
        versions.append(version)
        load(engine, version)

    monkeypatch.setattr(TransformersEngine, "load_weights", noted)
    setup_of().fit(max_epochs=1)
    assert versions == [0, 0, 4]


def test_losses_of_a_cut_update_are_means_of_the_steps_that_it_took(setup_of):
    """The statistics add up each step's part of a mean; here a part is 1."""

    class Ones(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_: object):
            pl_module.statistics.reset()
            taken = trainer.fit_loop.epoch_loop.batch_progress.current.processed
            pl_module.statistics.update({"loss": float(taken)})

    _, points, trainer = setup_of().fit(Ones(), max_epochs=-1, max_steps=6)
    assert trainer.global_step == 6
    losses = [point["update/loss"] for _, point in points if "update/loss" in point]
    assert losses == [1.0] * len(losses) and len(losses) >= 2


def test_the_logged_learning_rate_is_that_of_the_iteration(setup_of):
    _, points, _ = setup_of().fit(max_epochs=2)
    rates = [
        point["update/learning_rate"] for _, point in points if "update/learning_rate" in point
    ]
    assert rates[0] == pytest.approx(3e-3) and 0.0 < rates[1] < rates[0]
    _, points, _ = setup_of().fit(max_epochs=-1, max_steps=6)
    # also where the number of steps ends the run, whose last weights are validated
    assert [step for step, point in points if "val/success" in point][-1] == 2
    rates = [
        point["update/learning_rate"] for _, point in points if "update/learning_rate" in point
    ]
    assert rates == pytest.approx([3e-3] * len(rates)) and rates


@pytest.mark.parametrize("estimator", [BilevelGAE(), GroupRelative()], ids=["critic", "none"])
def test_the_variance_that_values_explain_is_logged_with_a_critic(setup_of, estimator):
    _, points, _ = setup_of(estimator=estimator).fit(max_epochs=1)
    names = {name for _, point in points for name in point}
    assert "rollout/policy_entropy" in names
    assert ("rollout/explained_variance" in names) == estimator.needs_values


class RandomHead(pl.Callback):
    """Start with a critic whose values are not 0."""

    def on_fit_start(self, trainer, pl_module):
        random = torch.Generator().manual_seed(0)
        with torch.no_grad():
            pl_module.critic.head.layers[-1].weight.normal_(std=0.3, generator=random)


@pytest.mark.parametrize("window", [1, "all"])
def test_a_run_is_the_same_with_values_of_the_engine_and_of_a_pass(setup_of, window):
    found = []
    for scoring in ("needed", "always"):
        agent, points, _ = setup_of(window=window, scoring=scoring).fit(RandomHead(), max_epochs=2)
        # without the pass they are those of the first step
        first = ("rollout/logprob_mismatch", "rollout/policy_entropy", "time")
        metrics = [
            {name: value for name, value in point.items() if not name.startswith(first)}
            for _, point in points
        ]
        tokens = agent.preparation.totals()["tokens"]
        found.append((tokens, agent.state_dict(), metrics))
    (tokens, weights, metrics), (others, expected, logged) = found
    assert 0 < tokens < others
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-4)
    assert sum("rollout/explained_variance" in point for point in metrics) == 2
    for point, other in zip(metrics, logged, strict=True):
        assert point == pytest.approx(other, rel=1e-4, abs=1e-4, nan_ok=True)


def test_rollout_progress_ends_with_all_episodes_done(setup_of):
    seen = []

    class ProgressRecorder(RolloutCallback):
        def on_rollout_progress(self, trainer, module, done, total):
            seen.append((done, total))

    setup_of().fit(ProgressRecorder(), max_epochs=1)
    assert seen[-1] == (12, 12) and seen.count((12, 12)) == 1
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_rollout_progress_ends_on_a_rank_without_episodes(setup_of):
    # ranks agree in the last call whether to stop
    _, datamodule = setup_of().build()
    calls = []
    responder = ScriptedResponder(policy=RandomPolicy())
    datamodule.proxy.rollout(
        responder, [], seed_key=(), progress=lambda done, total: calls.append((done, total))
    )
    assert calls == [(0, 0)]


def test_a_second_fit_of_the_same_trainer_continues(setup_of):
    agent, datamodule = setup_of().build()
    trainer = trainer_of(RolloutUpdate())
    trainer.fit(agent, datamodule=datamodule)
    first = trainer.fit_loop
    trainer.fit_loop.max_epochs = 2
    trainer.fit(agent, datamodule=datamodule)
    assert trainer.fit_loop is first and trainer.current_epoch == 2


def test_mixed_precision_trains_float32_weights(setup_of):
    agent, points, _ = setup_of().fit(precision="bf16-mixed", max_epochs=2)
    metrics = [point for _, point in points if "rollout/logprob_mismatch_max" in point]
    assert len(metrics) == 2
    assert all(torch.isfinite(value).all() for value in agent.state_dict().values())
    assert all(point["rollout/logprob_mismatch"] < 0.02 for point in metrics)
    trained = {weight.dtype for weight in agent.parameters() if weight.requires_grad}
    assert trained == {torch.float32}


def test_the_global_random_stream_does_not_change_a_run(setup_of):
    class RandomDraws(RolloutCallback):
        def on_train_batch_end(self, *args):
            torch.rand(3)

        def on_rollout_start(self, *args):
            torch.rand(5)

    setup = setup_of(dropout=0.1)
    plain, plain_points, _ = setup.fit(max_epochs=2)
    drawn, drawn_points, _ = setup.fit(RandomDraws(), max_epochs=2)
    assert plain_points == drawn_points
    assert all(
        torch.equal(parameter, other)
        for parameter, other in zip(plain.parameters(), drawn.parameters(), strict=True)
    )


def test_only_checkpoints_inside_an_update_hold_its_samples(setup_of, tmp_path):
    holds_samples = {}

    class SaveAndLoad(pl.Callback):
        def record(self, trainer, hook):
            trainer.save_checkpoint(tmp_path / "saved.ckpt")
            state = torch.load(tmp_path / "saved.ckpt", weights_only=True)
            holds_samples[hook] = state["RolloutDataModule"]["buffers"] != [None]

        def on_train_batch_end(self, trainer, *args):
            self.record(trainer, "batch")

        def on_train_epoch_end(self, trainer, *args):
            self.record(trainer, "epoch")

    setup_of().fit(SaveAndLoad(), max_epochs=1)
    assert holds_samples == {"batch": True, "epoch": False}


# ---- errors


def test_another_lightning_version_is_rejected(monkeypatch):
    monkeypatch.setattr(rollout_update.lightning, "__version__", "2.7.0")
    with pytest.raises(RuntimeError, match=r"builds on lightning 2\.6 and found 2\.7\.0; pip"):
        RolloutUpdate()


@pytest.mark.filterwarnings("ignore:.*but have no `val_dataloader`.*")
@pytest.mark.parametrize("given", ["none", "other"])
def test_a_datamodule_without_the_protocol_is_rejected(setup_of, given):
    class OtherDataModule(pl.LightningDataModule):
        def train_dataloader(self):
            return [1]

    agent, _ = setup_of().build()
    trainer = trainer_of(RolloutUpdate())
    data = {"datamodule": OtherDataModule()} if given == "other" else {"train_dataloaders": [1]}
    name = "OtherDataModule" if given == "other" else "NoneType"
    with pytest.raises(TypeError, match=f"found {name} as the Trainer's DataModule; pass one with"):
        trainer.fit(agent, **data)


# ---- Lightning's private names: a failure here means that the supported version must be revised


@pytest.mark.parametrize(
    "name",
    [
        "setup_data", "_should_reload_train_dl", "reset", "on_run_start", "on_advance_start", "advance",
        "on_advance_end", "on_save_checkpoint", "on_load_checkpoint", "_warn_if_modules_in_eval_mode",
    ],
)  # fmt: skip
def test_overridden_methods_exist(name):
    assert hasattr(fit_loop._FitLoop, name) or hasattr(loop._Loop, name)
    assert name in vars(RolloutUpdateLoop)


def test_used_private_names_exist():
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    outer = trainer.fit_loop
    epoch = outer.epoch_loop
    assert isinstance(outer, fit_loop._FitLoop) and isinstance(outer, loop._Loop)
    assert isinstance(epoch, training_epoch_loop._TrainingEpochLoop)
    for owner, names in {
        outer: (
            "_last_train_dl_reload_epoch", "_combined_loader_states_to_load", "_combined_loader",
            "_data_fetcher", "_loaded_from_state_dict", "_restarting", "_resuming_from_checkpoint",
            "epoch_progress",
        ),
        epoch: ("_batches_that_stepped", "_should_check_val_fx", "batch_progress", "val_loop"),
        trainer._logger_connector: ("_first_loop_iter",),
        trainer: ("validating", "training", "enable_validation"),
    }.items():  # fmt: skip
        assert [name for name in names if not hasattr(owner, name)] == []
    assert isinstance(epoch.batch_progress, progress._BatchProgress)
    assert isinstance(outer.epoch_progress.current, progress._ProcessedTracker)
    assert hasattr(epoch.batch_progress, "is_last_batch")
    assert hasattr(loop._Loop, "reset_restart_stage") and hasattr(loop._Loop, "restarting")


class Skewed(TransformersEngine):
    """An engine that reports other log-probs than it samples with."""

    def collect(self, *, wait: bool = True) -> list[tuple[int, Generation]]:
        return [
            (session, dataclasses.replace(generation, logprobs=generation.logprobs - 0.1))
            for session, generation in super().collect(wait=wait)
        ]


def test_a_run_ends_where_an_exact_engine_is_not(setup_of):
    _, points, _ = setup_of().fit(max_epochs=1)
    (metrics,) = [point for _, point in points if "rollout/logprob_mismatch" in point]
    name = "rollout/logprob_mismatch_turn_"
    turns = {key.removeprefix(name): value for key, value in metrics.items() if name in key}
    # there are three turns
    assert turns.keys() == {"1", "2", "3"} and max(turns.values()) < 1e-4
    error = r"^update.max_mismatch=0.01: .* differ by 0.1 nats a token .*\(turn 1: 0.1, turn 2: 0.1, turn 3: 0.1\)"
    with pytest.raises(RolloutError, match=error):
        setup_of(engine=Skewed).fit(max_epochs=1)
    # where it rounds, it need not be exact
    setup_of(engine=Skewed).fit(max_epochs=1, precision="bf16-mixed")
    setup_of(engine=Skewed, max_mismatch=None).fit(max_epochs=1)


def test_so_does_one_that_goes_on_inside_an_update(setup_of, tmp_path):
    file, skewed = tmp_path / "inside.ckpt", setup_of(engine=Skewed)

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 1:
                trainer.save_checkpoint(file)

    with pytest.raises(RolloutError):
        skewed.fit(Save(), max_epochs=1)
    with pytest.raises(RolloutError, match=r"update\.max_mismatch=0\.01"):
        skewed.fit(max_epochs=1, ckpt_path=str(file))
