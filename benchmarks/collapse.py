"""Provoke a collapse, report which diagnostic detects it first, and compare mitigations.

All runs start from the same warm start and differ only in the actions of the collapse monitor. The result is
`docs/collapse.md`.

    python benchmarks/collapse.py run --out runs/collapse
    python benchmarks/collapse.py report --out runs/collapse
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from hydra.utils import instantiate
from omegaconf import OmegaConf
from runner import ROOT, fit

from ragen_pl.callbacks.collapse import Alarm
from ragen_pl.metrics.record import RecordReader

Diagnostics = dict[str, float]
_ACT = (
    "callbacks.collapse.actions=[rollback,mitigate]",
    "callbacks.collapse.mitigation.clip_high=null",
)
PROBED = ("callbacks.diagnostics.probe_every_n_iterations=1",)
VARIANTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "a tenth of the learning rate": (*_ACT, "callbacks.collapse.mitigation.learning_rate_factor=0.1"),
    "KL penalty on": (*_ACT, "callbacks.collapse.mitigation.kl_coefficient=0.5"),
    "clip-higher, entropy target": (
        _ACT[0], "callbacks.collapse.mitigation.entropy_target=0.2",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """Result of a finished run: diagnostics by iteration, the monitor's events, success on the validation set."""

    diagnostics: Mapping[int, Diagnostics]
    events: list[dict[str, Any]]
    success: float

    @property
    def last(self) -> Diagnostics:
        """Diagnostics of the last iteration."""
        return self.diagnostics[max(self.diagnostics)]


def main() -> None:
    """Run the variants or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("run", "report"))
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "collapse")
    parser.add_argument("--lr", type=float, default=7.5e-4)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "collapse.md")
    parser.add_argument("--overrides", nargs="+", default=(), help="further overrides of every run")
    args = parser.parse_args()
    out = args.out.absolute()
    collapsing = (
        f"optimizer.lr={args.lr:g}", "learning_rate_end=1.0", "algorithm.loss.kl.coefficient=0.0",
        f"rollout.groups={args.groups}",
    )  # fmt: skip
    if args.action == "run":
        weights = out / "warm_start" / "warm_start.pt"
        common = (
            "env=frozenlake_visual",
            "algorithm=trico",  # whose loss covers the thoughts
            f"seed={args.seed}",
            "callbacks.progress=null",
            *args.overrides,
        )
        fit(
            weights.parent,
            *common,
            "logger=none",
            "trainer.max_epochs=0",
            "validation.baselines=null",
        )
        for name, monitor in VARIANTS.items():
            fit(
                out / name, *common, *collapsing, *monitor, f"warm_start.weights={weights}", "logger=none",
                f"trainer.max_epochs={args.iterations}", "trainer.check_val_every_n_epoch=10",
                "validation.baselines=null", "validation.blank=false", "callbacks.trajectories=null",
                *PROBED, "callbacks.collapse.good_every_n_iterations=1",
            )  # fmt: skip
    write_page(
        {name: read(out / name) for name in VARIANTS if (out / name / "metrics.json").exists()},
        alarms=alarms_of(out / "none"),
        page=args.page,
        command=" ".join(
            (
                "python -m ragen_pl.fit env=frozenlake_visual algorithm=trico",
                *collapsing,
                f"trainer.max_epochs={args.iterations}",
                *PROBED,
            )
        ),
    )


def read(folder: Path) -> Run:
    """Read the folder of a finished run."""
    diagnostics: dict[int, Diagnostics] = {}
    for point in RecordReader(folder).points():
        values = {
            name.removeprefix("diagnostics/"): value
            for name, value in point.metrics.items()
            if name.startswith("diagnostics/")
        }
        if values:
            diagnostics.setdefault(point.step, {}).update(values)
    events = folder / "collapse.jsonl"
    metrics = json.loads((folder / "metrics.json").read_text())
    return Run(
        diagnostics=diagnostics,
        events=[json.loads(line) for line in events.read_text().splitlines()]
        if events.exists()
        else [],
        success=metrics["val/success"],
    )


def alarms_of(folder: Path) -> dict[str, Alarm]:
    """Return the alarms in the config of a run."""
    settings = OmegaConf.load(folder / "config.yaml")
    alarms = settings.callbacks.collapse.alarms
    return {name: instantiate(alarm) for name, alarm in alarms.items() if alarm is not None}


def first_trip(alarm: Alarm, diagnostics: Mapping[int, Diagnostics]) -> int | None:
    """Return the first iteration in which an alarm trips, None if it never does."""
    count = 0
    for iteration in sorted(diagnostics):
        count = count + 1 if alarm.holds(diagnostics[iteration]) else 0
        if count == alarm.patience:
            return iteration
    return None


def failure(diagnostics: Mapping[int, Diagnostics]) -> int | None:
    """Return the iteration after which sampled success stays below half of its mean over the first three."""
    iterations = sorted(diagnostics)
    first = sum(diagnostics[at]["success"] for at in iterations[:3]) / 3
    low = [at for at in iterations if diagnostics[at]["success"] >= first / 2]
    after = max(low) + 1
    return after if after <= iterations[-1] else None


def write_page(
    runs: Mapping[str, Run], *, alarms: Mapping[str, Alarm], page: Path, command: str
) -> None:
    """Write the page and its image."""
    baseline = runs["none"]
    failed = failure(baseline.diagnostics)
    rows = []
    for name, alarm in alarms.items():
        at = first_trip(alarm, baseline.diagnostics)
        ahead = "" if at is None or failed is None else f"{failed - at:+d}"
        limit = f"below {alarm.below:g}" if alarm.below is not None else f"above {alarm.above:g}"
        rows.append(
            (
                at or 10**6,
                f"| `{name}` | `{alarm.diagnostic}` {limit} | {at or 'never'} | {ahead} |",
            )
        )
    last = max(baseline.diagnostics)
    alarm_rows = "\n".join(row for _, row in sorted(rows, key=lambda row: row[0]))
    action_rows = "\n".join(
        f"| {name} | {run.success:.3f} | {run.last.get('think_accuracy', float('nan')):.2f} | "
        f"{run.last['valid_actions']:.2f} | {_event_text(run.events)} |"
        for name, run in runs.items()
    )
    image = page.with_name("collapse.png")
    draw(runs, failed=failed, file=image)
    outcome = (
        f"Sampled success stays below half of its first values from iteration {failed}."
        if failed
        else f"Sampled success does not stay below half of its first values within {last} iterations."
    )
    page.write_text(
        _PAGE.format(
            command=command,
            outcome=outcome,
            alarm_rows=alarm_rows,
            action_rows=action_rows,
            image=image.name,
        )
    )
    print(page)


def _event_text(events: list[dict[str, Any]]) -> str:
    texts = [
        f"{event['iteration']}: {', '.join(event['alarms'])}"
        + (" (stopped the run)" if any("stopped" in done for done in event["done"]) else "")
        for event in events
    ]
    return "; ".join(texts) or "none"


def draw(runs: Mapping[str, Run], *, failed: int | None, file: Path) -> None:
    """Draw the diagnostics of the run without actions, and the success of all runs."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    baseline = runs["none"].diagnostics
    for name in (
        "think_accuracy",
        "mutual_information_share",
        "valid_actions",
        "entropy",
        "success",
    ):
        values = {at: diagnostic[name] for at, diagnostic in baseline.items() if name in diagnostic}
        left.plot(list(values), list(values.values()), label=name)
    if failed:
        left.axvline(failed, color="grey", linestyle=":")
    left.set(title="diagnostics without actions", xlabel="iteration", ylim=(-0.05, 1.05))
    left.legend(fontsize=8)
    for name, run in runs.items():
        right.plot(
            list(run.diagnostics),
            [diagnostic["success"] for diagnostic in run.diagnostics.values()],
            label=name,
        )
    right.set(title="sampled success by action", xlabel="iteration")
    right.legend(fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(file, dpi=110)
    plt.close(figure)


_PAGE = """# A provoked collapse

Generated by `python benchmarks/collapse.py run`. The default run with half of its episodes per iteration, a high
constant learning rate, no KL penalty and no filter, from the usual warm start, with probes in every iteration:

```
{command}
```

{outcome}

![Diagnostics, and success by mitigation]({image})

The iteration in which each alarm of `conf/callbacks/default.yaml` trips (with its patience, without the first
`grace` iterations), and how many iterations this is before success is lost:

| alarm | limit | iteration | ahead |
|---|---|---|---|
{alarm_rows}

Results of the monitor's actions from the same initial weights (greedy success on the held-out validation set after
the last iteration, and the alarms that led to an action, by iteration):

| action | success | think accuracy | valid actions | alarms |
|---|---|---|---|---|
{action_rows}
"""


if __name__ == "__main__":
    main()
