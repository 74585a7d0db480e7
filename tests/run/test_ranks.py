"""Two processes train one policy: the same trajectories as one process, the same weights on both."""

from __future__ import annotations

import json

import pytest


@pytest.mark.slow
def test_two_ranks_play_what_one_plays_and_agree(job):
    def play(*overrides):
        one = job()
        one.run(
            "warm_start.enabled=false",
            "trainer.max_epochs=2",
            "+callbacks.record._target_=killing.Record",
            f"+callbacks.record.folder={one.folder.parent}",
            *overrides,
        )
        files = sorted(one.folder.parent.glob("rank_*.json"))
        return one, [json.loads(file.read_text()) for file in files]

    alone, [single] = play()
    both, [first, second] = play("trainer.devices=2", "trainer.strategy=ddp")
    assert first["weights"] == second["weights"]
    assert first["responses"].keys().isdisjoint(second["responses"])
    together = first["responses"] | second["responses"]
    assert together.keys() == single["responses"].keys() and len(together) == 16
    before_any_update = [key for key in together if key.startswith("0 ")]
    assert len(before_any_update) == 8
    assert all(together[key] == single["responses"][key] for key in before_any_update)
    assert both.metrics["val/episodes"] == alone.metrics["val/episodes"] == 16
    assert both.metrics["rollout/episodes"] == alone.metrics["rollout/episodes"] == 8
    for file in both.folder.rglob("*"):
        assert "rank" not in file.name and file.suffix != ".partial"


@pytest.mark.slow
def test_two_ranks_roll_back_together(job):
    one = job()
    one.run(
        "trainer.devices=2",
        "trainer.strategy=ddp",
        "warm_start.enabled=false",
        "trainer.max_epochs=4",
        "+callbacks.record._target_=killing.Record",
        f"+callbacks.record.folder={one.folder.parent}",
        "callbacks.collapse.actions=[rollback,mitigate]",
        "callbacks.collapse.mitigation.learning_rate_share=0.5",
        "callbacks.collapse.good_every_n_iterations=1",
        "callbacks.collapse.alarms.form=null",  # what is not trained has none
        "callbacks.collapse.alarms.gradient.above=0.0",  # known from the third iteration on
    )
    (event,) = map(json.loads, (one.folder / "collapse.jsonl").read_text().splitlines())
    assert event["iteration"] == 3
    assert "rolled weights and optimizer back to iteration 2" in event["done"]
    first, second = (
        json.loads(file.read_text()) for file in sorted(one.folder.parent.glob("rank_*.json"))
    )
    assert first["weights"] == second["weights"]
    assert first["responses"].keys().isdisjoint(second["responses"])
    assert len(first["responses"]) + len(second["responses"]) == 4 * 8
