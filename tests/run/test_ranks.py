"""Two processes train one policy: same trajectories as one process, same weights on run."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from support.models.family_models import tiny
from support.runs.small_runs import JOB, SMALL, run_ranks

from ragen_pl.viewing.validations import read_validation, validation_files


@pytest.mark.slow
def test_two_ranks_play_the_trajectories_of_one_and_agree_on_weights(job):
    def play(*overrides):
        run = job()
        run.run(
            "warm_start.enabled=false",
            "validation.baselines=null",
            "trainer.max_epochs=2",
            "algorithm.loss.kl.clip_norm=0.5",
            "callbacks.trajectories={_target_: ragen_pl.callbacks.trajectories.LogTrajectories}",
            "+callbacks.record._target_=support.runs.killing.Record",
            f"+callbacks.record.folder={run.folder.parent}",
            *overrides,
            launched=False,
        )
        files = sorted(run.folder.parent.glob("rank_*.json"))
        return run, [json.loads(file.read_text()) for file in files]

    single_run, [single] = play()
    run, [first, second] = play("trainer.devices=2", "trainer.strategy=ddp")
    assert first["weights"] == second["weights"]
    assert first["responses"].keys().isdisjoint(second["responses"])
    together = first["responses"] | second["responses"]
    assert together.keys() == single["responses"].keys() and len(together) == 16
    before_any_update = [key for key in together if key.startswith("0 ")]
    assert len(before_any_update) == 8
    assert all(together[key] == single["responses"][key] for key in before_any_update)
    assert run.metrics["val/episodes"] == single_run.metrics["val/episodes"] == 16
    assert run.metrics["rollout/episodes"] == single_run.metrics["rollout/episodes"] == 8
    # of the same weights
    validated = [validation_files(one.folder, "held_out") for one in (single_run, run)]
    alone, both = (read_validation(files[0]) for files in validated)
    assert len(alone["episodes"]) == 16 and alone["episodes"] == both["episodes"]
    # pages show episodes of one rank, and count those of all
    for name, number in (("iteration_0000", 8), ("validation_0000", 16)):
        counts = [
            json.loads((one.folder / "trajectories" / name / "played.json").read_text())
            for one in (single_run, run)
        ]
        assert counts[0] == counts[1] and counts[0]["episodes"] == number
    tokens = sum(len(turn) for turns in together.values() for turn in turns)
    assert read_validation(validated[1][2])["cost"]["response_tokens"] == tokens
    for file in run.folder.rglob("*"):
        assert "rank" not in file.name and file.suffix != ".partial"


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(job):
    """One rank, then two, then one again, changed at the ends of iterations."""

    def settings(run) -> tuple[str, ...]:
        return (
            "warm_start.enabled=false",
            "validation.baselines=null",
            "callbacks.checkpoint.every_n_epochs=1",
            "+callbacks.record._target_=support.runs.killing.RecordEpisodes",
            f"+callbacks.record.file={run.folder.parent / 'played.jsonl'}",
            "ckpt_path=auto",
        )

    def played(run) -> list[dict]:
        lines = (run.folder.parent / "played.jsonl").read_text().splitlines()
        return sorted(map(json.loads, lines), key=lambda line: line["episode"])

    whole, changed = job(), job()
    whole.run(*settings(whole))
    changed.kill_at("begin-1", *settings(changed))
    two = ("trainer.devices=2", "trainer.strategy=ddp")
    changed.kill_at("begin-2", *settings(changed), *two, launched=False)
    changed.run(*settings(changed))
    expected, found = played(whole), played(changed)
    assert [line["ranks"] for line in found] == [1] * 8 + [2] * 8 + [1] * 8
    for name in ("episode", "seed", "first_prompt"):
        assert [line[name] for line in found] == [line[name] for line in expected]
    # of the same weights up to here; two ranks then make minibatches of other samples
    assert [line["responses"] for line in found[:16]] == [
        line["responses"] for line in expected[:16]
    ]
    assert changed.steps == whole.steps == 24
    costs = [
        read_validation(validation_files(one.folder, "held_out")[3])["cost"]
        for one in (whole, changed)
    ]
    assert [cost["episodes"] for cost in costs] == [24, 24]
    assert all(cost["processor_seconds"] > 0 for cost in costs)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)


def cut(file: Path) -> None:
    # without the list of sizes, which all ranks compare at their start
    (file.parent / "files.json").unlink()
    file.write_bytes(file.read_bytes()[:-100])


# of the state of the second rank, and how the ranks are started
DAMAGES = [(flip, None), (cut, JOB)]


@pytest.mark.slow
def test_a_checkpoint_inside_a_step_has_a_file_for_each_rank_and_is_resumed_exactly(tmp_path):
    settings = (
        *SMALL,
        "warm_start.enabled=false",
        "validation.baselines=null",
        "trainer.devices=2",
        "trainer.strategy=ddp",
        "trainer.accumulate_grad_batches=2",
        "algorithm.loss.kl.clip_norm=0.5",
        "trainer.max_epochs=2",
        "ckpt_path=auto",
    )
    reference, killed = tmp_path / "reference", tmp_path / "killed"
    for folder in (reference, killed):
        folder.mkdir()
    whole = run_ranks(reference, [*settings, f"paths.run_dir={reference / 'run'}"])
    assert [rank.code for rank in whole] == [0, 0], whole[0].output

    mine = (*settings, f"paths.run_dir={killed / 'run'}")
    kill = [
        "+callbacks.kill._target_=support.runs.killing.SaveAndKill",
        "+callbacks.kill.iteration=1",
    ]
    first, _ = run_ranks(killed, [*mine, *kill])
    assert first.code == -signal.SIGKILL
    last = killed / "run" / "checkpoints" / "last.ckpt"
    (folder,) = last.parent.glob("*.shards")
    names = {
        f"{kind}_{rank}.pt"
        for kind in ("samples", "gradients", "separate_gradients")
        for rank in range(2)
    }
    assert {file.name for file in folder.iterdir()} == names | {"files.json"}
    states = torch.load(last, weights_only=True)["loops"]["fit_loop"]["state_dict"]["gradients"]
    assert [entry["name"] for entry in states["files"]] == ["gradients_0.pt", "gradients_1.pt"]

    for number, (damage, environment) in enumerate(DAMAGES):
        # a rank that found it alone would leave the other one in a collective
        copy = shutil.copytree(killed / "run", tmp_path / str(number) / "run")
        (state,) = copy.glob("checkpoints/*.shards/gradients_1.pt")
        damage(state)
        given = [*settings, "trainer.timeout_s=1000", f"paths.run_dir={copy}"]
        ended = run_ranks(copy.parent, given, environment=environment)
        output = "".join(rank.output for rank in ended)
        assert [rank.code for rank in ended] == [2, 2] and "Traceback" not in output, output
        assert ended[1].line.startswith(f"ragen_pl: {state}: ") and "copy " in ended[1].line
        assert ended[0].line.endswith(f"failed: {ended[1].line.removeprefix('ragen_pl: ')}")

    resumed = run_ranks(killed, mine)
    assert [rank.code for rank in resumed] == [0, 0], resumed[0].output
    expected = torch.load(reference / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    found = torch.load(last, weights_only=True)
    assert found["global_step"] == expected["global_step"]
    for name, weight in expected["state_dict"].items():
        assert found["state_dict"][name].equal(weight), name
    # a checkpoint of an iteration's end has none
    assert not list(last.parent.glob("*.shards"))


@pytest.mark.slow
def test_an_image_encoder_that_no_step_uses_may_be_trained_under_ddp(job, tmp_path):
    """A step without images has no gradients of the encoder, for which DDP would wait in the next one."""
    tiny("qwen3_vl").save(tmp_path / "model")
    run = job()
    run.run(
        "env=frozenlake",
        "env.max_turns=2",
        "curriculum=null",
        "model=pretrained",
        f"model.build.path={tmp_path / 'model'}",
        "model.build.freeze_vision=false",
        "model.build.freeze_projector=false",
        "algorithm=rloo",
        "rollout.groups=4",
        "rollout.group_size=2",
        "rollout.max_response_tokens=8",
        "context.max_tokens=400",
        "update.minibatches=2",
        "validation.episodes=4",
        "validation.baselines=null",
        "warm_start=none",
        "trainer.devices=2",
        "trainer.strategy=ddp",
        "trainer.max_epochs=1",
        "logger=none",
        settings=(),
        launched=False,
    )
    assert run.steps >= 2


@pytest.mark.slow
def test_a_rank_whose_demonstrations_all_fail_takes_part_in_the_warm_start(job):
    run = job()
    output = run.run(
        "trainer.devices=2",
        "trainer.strategy=ddp",
        "trainer.max_epochs=1",
        "warm_start.demonstrator._target_=support.runs.killing.FailingDemonstrator",
        "~warm_start.demonstrator.base",
        "~warm_start.demonstrator.noise",
        "+warm_start.demonstrator.rank=1",
        "+callbacks.record._target_=support.runs.killing.Record",
        f"+callbacks.record.folder={run.folder.parent}",
        launched=False,
    )
    assert "8 of 8 episodes failed with FailingDemonstrator" in output
    first, second = (
        json.loads(file.read_text()) for file in sorted(run.folder.parent.glob("rank_*.json"))
    )
    assert first["weights"] == second["weights"]


@pytest.mark.soak
def test_two_ranks_roll_back_together(job):
    run = job()
    run.run(
        "trainer.devices=2",
        "trainer.strategy=ddp",
        "warm_start.enabled=false",
        "trainer.max_epochs=4",
        "+callbacks.record._target_=support.runs.killing.Record",
        f"+callbacks.record.folder={run.folder.parent}",
        "callbacks.collapse.actions=[rollback,mitigate]",
        "callbacks.collapse.mitigation.learning_rate_factor=0.5",
        "callbacks.collapse.good_every_n_iterations=1",
        # an untrained policy's responses have no valid format
        "callbacks.collapse.alarms.format=null",
        # the diagnostic exists from the third iteration on
        "callbacks.collapse.alarms.gradient.above=0.0",
    )
    (event,) = map(json.loads, (run.folder / "collapse.jsonl").read_text().splitlines())
    assert event["iteration"] == 3
    assert "rolled weights and optimizer back to iteration 2" in event["done"]
    first, second = (
        json.loads(file.read_text()) for file in sorted(run.folder.parent.glob("rank_*.json"))
    )
    assert first["weights"] == second["weights"]
    assert first["responses"].keys().isdisjoint(second["responses"])
    assert len(first["responses"]) + len(second["responses"]) == 4 * 8
