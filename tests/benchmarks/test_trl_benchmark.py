"""The comparison with TRL: processes that take turns, episodes as TRL reads them, ratios, a missing package."""

import importlib
import io
import json
import sys
from pathlib import Path

import pytest
import torch
from support.episodes.trajectories import roll_out, starts

from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.modules.policy import PolicyModule

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
alternation, timing, trl_grpo, trl_side = map(
    importlib.import_module, ("alternation", "timing", "trl_grpo", "trl_side")
)
sys.path.pop(0)

TINY = "{hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1}"
# untrained responses are invalid, and an episode goes on
OVERRIDES = (
    f"model.build.text={TINY}", "warm_start.enabled=false", "env.max_turns=3", "env.invalid_ends=false",
    "rollout.max_response_tokens=4",
)  # fmt: skip


def episodes(*overrides: str, seed: int = 0):
    """Return episodes of an untrained policy."""
    parts = timing.build_components(
        ["env=frozenlake", "context.window=all", *OVERRIDES, *overrides]
    )
    engine = TransformersEngine(PolicyModule(parts.bundle))
    engine.load_weights(0)
    return roll_out(parts.proxy, engine, starts(3), seed_key=(seed,))


def test_completion_holds_every_turn_and_marks_what_was_sampled():
    for trajectory in episodes():
        prompt, completion, sampled = trl_side.as_completion(trajectory)
        first, *_, last = trajectory.turns
        assert len(trajectory.turns) == 3 and prompt == first.prompt_ids.tolist()
        assert prompt + completion == [*last.prompt_ids.tolist(), *last.response_ids.tolist()]
        marked = [token for token, own in zip(completion, sampled, strict=True) if own]
        assert marked == [
            token for turn in trajectory.turns for token in turn.response_ids.tolist()
        ]
        assert 0 < sum(sampled) < len(sampled)


def test_completion_needs_the_whole_history():
    with pytest.raises(ValueError, match=r"turn 2: .* set context\.window=all"):
        trl_side.as_completion(episodes("context.window=1")[0])


def test_models_with_different_weights_are_told_apart():
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    trl_side.check_equal(one, one)
    with pytest.raises(ValueError, match="2 weights of TRL's model differ, bias first"):
        trl_side.check_equal(one, other)


def test_step_is_timed_between_pauses(monkeypatch, capsys):
    clocks = {
        "wall": iter([10.0, 12.0, 15.0, 17.0, 20.0, 21.0]),
        "cpu": iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
    }
    meter = alternation.Meter()
    for name, ticks in clocks.items():
        meter.watches[name].clock = ticks.__next__
    monkeypatch.setattr(sys, "stdin", io.StringIO("go\ngo\n"))
    trajectories = episodes()
    meter.pause()
    with meter.rollout():
        pass
    meter.note(trajectories)
    meter.pause()
    record = json.loads(capsys.readouterr().out)
    tokens = sum(len(turn.response_ids) for trajectory in trajectories for turn in trajectory.turns)
    assert record == {
        "wall": 7.0, "cpu": 3.0, "rollout, wall": 3.0, "rollout, cpu": 1.0, "tokens": tokens, "turns": 9,
    }  # fmt: skip
    with pytest.raises(SystemExit, match="has ended"):
        meter.pause()


def test_side_takes_a_step_when_asked_and_tells_of_its_end():
    script = "import sys\nsys.stdin.readline()\nprint('starts')\nprint('{\"wall\": 2.5}')"
    side = alternation.Side("TRL", ["-c", script])
    try:
        assert side.step() == {"wall": 2.5}
        with pytest.raises(SystemExit, match="the process of TRL has ended"):
            side.step()
    finally:
        side.close()


def test_ratio_of_a_step_is_the_median_over_pairs():
    ours = [{"cpu": seconds, "tokens": 100} for seconds in (1.0, 2.0, 1.0)]
    theirs = [{"cpu": seconds, "tokens": 50} for seconds in (2.0, 8.0, 5.0)]
    of_step, of_token = trl_grpo.ratios({"ragen_pl": ours, "TRL": theirs}, "cpu")
    assert of_step == 4.0 and of_token == pytest.approx((15 / 150) / (4 / 300))


@pytest.mark.parametrize(
    ("arguments", "missing", "line"),
    [
        ([], ("trl", "datasets"), "not installed: trl, datasets; run `pip install trl`"),
        (["--episodes", "12"], (), "--episodes 12: give a multiple of --group-size 8"),
    ],
)
def test_wrong_start_ends_in_one_line(monkeypatch, arguments, missing, line):
    monkeypatch.setattr(trl_grpo, "find_spec", lambda name: None if name in missing else object())
    monkeypatch.setattr(sys, "argv", ["trl_grpo.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        trl_grpo.main()
    assert ended.value.code == line


def numbers(cells: list[str]) -> list[float]:
    return [float(cell.replace(",", "")) for cell in cells]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_both_sides_take_the_same_steps(monkeypatch, capsys):
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    few = "--episodes 8 --group-size 4 --steps 2 --warm-up 1 --trl-micro-batch 2 update.epochs=2 update.minibatches=2"
    monkeypatch.setattr(sys, "argv", ["trl_grpo.py", *few.split(), *OVERRIDES])
    trl_grpo.main()
    printed = capsys.readouterr().out
    assert "groups of 4, at most 3 turns of 4 tokens, optimizer steps of a step: 4" in printed
    rows = [line.split() for line in printed.splitlines() if line.strip().startswith("8 ")]
    assert [row[1] for row in rows[:2]] == ["wall", "cpu"]
    for row in rows[:2]:
        step, rollout, _, their_step, their_rollout, _, *ratios = numbers(row[2:])
        assert 0 < rollout < step and 0 < their_rollout < their_step and min(ratios) > 0
    tokens, their_tokens, turns, their_turns = numbers(rows[2][1:])
    assert turns == their_turns == 8 * 3
    assert 0.8 < tokens / their_tokens < 1.25
