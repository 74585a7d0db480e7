"""The benchmarks run, and their computations are correct."""

import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from support.models.tiny_models import TEXT

from ragen_pl.callbacks.collapse import Alarm
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.metrics.record import MetricsRecord
from ragen_pl.models.build import build_small_lm, build_small_vlm
from ragen_pl.modules.policy import PolicyModule

FOLDER = Path(__file__).parents[2] / "benchmarks"
torch.set_num_threads(1)


def load(name: str) -> ModuleType:
    """Import a script, which finds its neighbors as it does when it is run."""
    sys.path.insert(0, str(FOLDER))
    try:
        __import__(name)
    finally:
        sys.path.remove(str(FOLDER))
    return sys.modules[name]


rollout, update, timing, dialogue = map(load, ("rollout", "update", "timing", "dialogue"))


@pytest.mark.parametrize("images", [False, True])
def test_both_engines_generate_the_same_dialogue(images):
    made = (build_small_vlm if images else build_small_lm)(text=TEXT)
    watch = timing.Stopwatch(time.perf_counter)
    made.model.generation_config.eos_token_id = list(
        range(200, 400)
    )  # many ends, were they allowed
    bundle = rollout.endless(made)
    engine, shapes = TransformersEngine(PolicyModule(bundle)), []
    for response in (
        partial(rollout.engine_response, engine, 5),
        partial(rollout.generate_response, bundle, 5),
    ):
        seen = []

        def watched(turn, prompts, response=response, seen=seen):
            responses = response(turn, prompts)
            seen.append(([len(p.ids) for p in prompts], [len(p.images) for p in prompts]))
            assert [len(ids) for ids in responses] == [5] * 3
            assert not set(np.concatenate(responses).tolist()) & set(bundle.eos_token_ids)
            return responses

        rollout.Dialogue(num_envs=3, turns=3, rules=True, watch=watch).play(bundle, watched)
        shapes.append(seen)
    assert shapes[0] == shapes[1]
    assert [images for _, images in shapes[0]] == [[t * images] * 3 for t in (1, 2, 3)]
    assert engine.prefilled_tokens < sum(sum(lengths) for lengths, _ in shapes[0])
    assert watch.take()["environments"] > 0


def test_growth_exponent_of_a_power_law():
    assert rollout.exponent([4, 8, 16, 32], [3 * n**1.5 for n in (4, 8, 16, 32)]) == pytest.approx(
        1.5
    )
    assert rollout.exponent([4, 8], [1.0, 2.0]) == pytest.approx(1.0)


def test_padding_share_covers_all_minibatches():
    two = [torch.tensor([2, 10]), torch.tensor([10, 10])]
    assert update.padding(two, 1) == pytest.approx(8 / 40)
    assert update.padding(two, 2) == pytest.approx(0.0)


def test_stopwatch_accumulates_and_resets():
    times = iter([1.0, 3.0, 10.0, 10.5])
    watch = timing.Stopwatch(lambda: next(times))
    box = ModuleType("box")
    box.double = lambda number: 2 * number
    watch.wrap(box, "double", part="work")
    assert [box.double(2), box.double(5)] == [4, 10]
    assert watch.take() == {"work": 2.5} and watch.take() == {}


def printed(monkeypatch, capsys, *arguments: str) -> str:
    """Return what the rollout benchmark prints of a tiny model."""
    monkeypatch.setattr(rollout, "TURNS_OF_FIT", (1, 2))
    monkeypatch.setattr(rollout, "MODELS", {"default, text": partial(build_small_lm, text=TEXT)})
    sizes = "--num-envs 2 --fit-num-envs 2 --turns 2 --response-tokens 3 --rounds 1"
    monkeypatch.setattr(sys, "argv", ["rollout.py", *sizes.split(), *arguments])
    rollout.main()
    return capsys.readouterr().out


def test_rollout_benchmark_prints_all_tables_without_vllm_and_trl(monkeypatch, capsys):
    monkeypatch.setattr(dialogue, "find_spec", lambda _: None)
    text = printed(monkeypatch, capsys)
    assert text.count("default, text") == 4 and "exponent" in text
    # thousands are separated by commas
    lines = text.replace(",", "").splitlines()
    rows = {line[:20].strip(): line[20:].split() for line in lines}
    assert rows["vLLM"] == ["not", "installed:", "vllm"] and rows["TRL"][0] == "not"
    tokens, turns, prefilled, share = rows["in-process engine"]
    assert float(tokens) == pytest.approx(3 * float(turns), rel=0.1)
    assert 0 < float(prefilled) < float(rows["generate"][2])
    assert 0 < float(share.rstrip("%")) < 100
    assert "one response at a time: vLLM, not installed: vllm" in text


def test_waiting_returns_the_responses_of_a_turn_together():
    class Engine:
        def __init__(self):
            self.pending = []

        def submit(self, requests, *, keep):
            self.pending += requests

        def collect(self, *, wait=True):
            return [(self.pending.pop(), None)] if self.pending else []

    together = rollout.Together(Engine())
    together.submit([1, 2], keep=True)
    together.submit([3], keep=True)
    assert [number for number, _ in together.collect()] == [3, 2, 1]
    assert together.collect() == []


def test_ends_give_responses_of_very_different_lengths():
    bundle = rollout.with_ends(build_small_lm(text=TEXT))
    assert 0.04 < len(bundle.eos_token_ids) / len(bundle.tokenizer) < 0.06


def test_update_benchmark_prints_both_windows(monkeypatch, capsys):
    arguments = "update.py --iterations 2 rollout.groups=8 validation.episodes=4"
    monkeypatch.setattr(sys, "argv", arguments.split())
    update.main()
    printed = capsys.readouterr().out
    assert "context.window=1:" in printed and "context.window=all:" in printed
    assert printed.count("as configured (6)") == 2


def test_iteration_benchmark_prints_parts_that_sum_to_an_iteration(monkeypatch, capsys):
    arguments = "iteration.py --iterations 2 env=bandit warm_start=none rollout.groups=8 validation.held_out=false"
    monkeypatch.setattr(sys, "argv", arguments.split())
    load("iteration").main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if " ms" in line]
    *parts, whole = [float(line[line.index("ms" if "ms" in line else "ms,") - 1]) for line in lines]
    assert len(parts) == 9 and all(part > 0 for part in parts)
    assert sum(parts) == pytest.approx(whole, abs=1)


def test_comparison_reports_means_over_seeds_and_paired_differences(tmp_path: Path) -> None:
    comparison, report = load("comparison"), load("comparison_report")
    folders = {}
    successes = {"trico, masks only": (0.4, 0.6), "trico": (0.5, 0.5)}
    for algorithm, lasts in successes.items():
        for seed, last in enumerate(lasts):
            cell = comparison.Cell(environment="frozenlake_visual", algorithm=algorithm, seed=seed)
            folder = folders[cell.environment, cell.algorithm, seed] = cell.folder(tmp_path)
            folder.mkdir(parents=True)
            record = MetricsRecord(folder)
            for n in (0, 1):
                record.add({"elapsed_s": 60.0 * n, "val/success": last * n}, 10 * n)
            # the last quarter of five iterations is two of them
            for n in range(1, 6):
                record.add({"elapsed_s": 6.0 * n, "rollout/success": last * (n > 3)}, n)
            (folder / "metrics.json").write_text(json.dumps({"val/think_accuracy": last}))
    page = tmp_path / "results.md"
    report.write_report(folders, page=page, budget="10 iterations")
    # Student's t with one degree of freedom: 12.706 * 0.1; half of the time's mean is 0.5
    means = "0.000 | 0.500 ± 1.271 | 0.600, 0.400 | 10 | 0.250 ± 0.635 | 0.500 ± 1.271 | 0.50 |"
    assert f"| trico, masks only | 2 | {means}" in page.read_text()
    assert "| trico | 2 | +0.000 ± 1.271 | +0.000 ± 0.635 | +0.000 ± 1.271 |" in page.read_text()
    assert "with 10 iterations." in page.read_text()
    assert (tmp_path / "results_frozenlake_visual.png").stat().st_size > 1000


def test_collapse_page_names_the_first_alarm(tmp_path: Path) -> None:
    collapse = load("collapse")
    columns = ("success", "think_accuracy_ratio", "valid_actions", "entropy")
    collapsing = [
        (0.4, 1.0, 1.0, 0.2), (0.5, 0.4, 1.0, 0.2), (0.4, 0.3, 0.4, 0.2),
        (0.1, 0.2, 0.4, 0.3), (0.3, 0.1, 0.3, 0.3), (0.1, 0.0, 0.1, 0.3),
    ]  # fmt: skip

    def run_of(rows: Sequence[Sequence[float]], *events: dict) -> Any:
        diagnostics = {at: dict(zip(columns, row, strict=True)) for at, row in enumerate(rows, 1)}
        return collapse.Run(diagnostics=diagnostics, events=[*events], success=rows[-1][0])

    stopped = {"iteration": 2, "alarms": ["think_accuracy"], "done": ["stopped the run"]}
    runs = {
        "none": {0: run_of(collapsing), 1: run_of(collapsing[:4]), 2: run_of(collapsing[:2])},
        "KL penalty on": {0: run_of(collapsing[:2], stopped)},
    }
    alarms = {
        "format": Alarm(diagnostic="valid_actions", below=0.5, patience=2),
        "think_accuracy": Alarm(diagnostic="think_accuracy_ratio", below=0.5),
        "entropy": Alarm(diagnostic="entropy", below=0.1),
    }
    page = tmp_path / "collapse.md"
    collapse.write_page(runs, alarms=alarms, page=page, command="fit")
    text = page.read_text()
    # it exceeds half again in iteration 5; the second run ends before, the third does not collapse
    assert "in 2 of 3 seeds, from the iteration\n6, 4, never." in text
    truth = "| `think_accuracy` | `think_accuracy_ratio` below 0.5 | 2, 2, 2 | 2 of 2 | +3 |"
    form = "| `format` | `valid_actions` below 0.5 | 4, 4, never | 1 of 2 | +1 |"
    never = "| `entropy` | `entropy` below 0.1 | never, never, never | 0 of 2 |  |"
    assert 0 < text.index(truth) < text.index(form) < text.index(never)
    assert "| KL penalty on | 0.500 | 0.500 | never |  |  | 1.00 | 1 |" in text
    runs = {
        "none": dict.fromkeys(range(5), run_of(collapsing)),
        "KL penalty on": dict.fromkeys(range(5), run_of(collapsing[:2])),
        "filter": {
            **dict.fromkeys(range(3), run_of(collapsing[:2])),
            **dict.fromkeys((3, 4), run_of(collapsing)),
        },
    }
    collapse.write_page(runs, alarms=alarms, page=page, command="fit")
    text = page.read_text()
    assert "| never, never, never, never, never | yes |" in text
    assert "| never, never, never, 6, 6 | no |" in text and "| 6, 6, 6, 6, 6 |  |" in text
    assert (tmp_path / "collapse.png").stat().st_size > 1000
