"""Repeat what papers found, with seeds and intervals: runs of each finding, and the report `docs/findings.md`.

`finding_cases.py` declares them. All runs of a seed and task start from the same warm start. Finished runs are kept and
interrupted ones are continued.

    python benchmarks/findings.py list
    python benchmarks/findings.py run filter --seeds 5 --jobs 2
    python benchmarks/findings.py report
"""

from __future__ import annotations

import argparse
import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from finding_cases import FINDINGS, Finding, Overrides
from runner import QUIET, ROOT, fit, is_finished

# of all runs
_COMMON = (
    *QUIET, "callbacks.diagnostics=null", "callbacks.collapse=null", "callbacks.plots=null",
    "validation.baselines=null", "validation.blank=false", "learning_rate_end=1.0", "optimizer.lr=4e-4",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a finding."""

    name: str
    arm: str
    seed: int

    @property
    def finding(self) -> Finding:
        """The finding."""
        return FINDINGS[self.name]

    def folder(self, out: Path) -> Path:
        """Return the run's folder, another one where the settings have changed."""
        arm = self.arm.replace("%", "").replace(", ", "_").replace(" ", "_")
        return out / self.name / f"{arm}_{_digest(self.settings)}" / str(self.seed)

    def start(self, out: Path) -> Path:
        """Return the folder of the warm start that the run shares with others."""
        digest = _digest(self.finding.start_of(self.arm))
        return out / "warm_starts" / f"{self.finding.task}_{digest}" / str(self.seed)

    def start_overrides(self) -> Overrides:
        """Return the overrides of the warm start."""
        return (
            *self.finding.start_of(self.arm), "algorithm=trico", *_COMMON, "trainer.max_epochs=0",
            "trainer.limit_val_batches=0", f"seed={self.seed}",
        )  # fmt: skip

    @property
    def settings(self) -> Overrides:
        """Overrides of all seeds. Half of the iterations lie between two validations."""
        finding = self.finding
        return (
            f"trainer.max_epochs={finding.iterations}", f"trainer.check_val_every_n_epoch={finding.iterations // 2}",
            *finding.start_of(self.arm), *finding.overrides, *finding.arms[self.arm], *_COMMON,
        )  # fmt: skip

    def overrides(self, out: Path) -> Overrides:
        """Return the overrides of the run."""
        weights = self.start(out) / "warm_start.pt"
        return (*self.settings, f"seed={self.seed}", f"warm_start.weights='{weights}'")


def _digest(overrides: Overrides) -> str:
    return hashlib.sha256(repr(overrides).encode()).hexdigest()[:8]


def cells(name: str, *, seeds: int) -> list[Cell]:
    """Return the runs of a finding in order: of each seed the two arms that decide, then all others."""
    criterion, arms = FINDINGS[name].criterion, FINDINGS[name].arms
    deciding = [criterion.more, criterion.less]
    others = [arm for arm in arms if arm not in deciding]
    return [
        Cell(name=name, arm=arm, seed=seed)
        for chosen in (deciding, others)
        for seed in range(seeds)
        for arm in chosen
    ]


def run(name: str, out: Path, *, seeds: int, jobs: int) -> None:
    """Run a finding, several runs at once: first the warm starts that runs share, then the runs that have theirs."""
    planned = cells(name, seeds=seeds)
    sharing = {cell.start(out): cell for cell in planned}

    def begin(cell: Cell) -> bool:
        return fit(cell.start(out), *cell.start_overrides())

    def train(cell: Cell) -> bool:
        return fit(cell.folder(out), *cell.overrides(out))

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(begin, sharing.values()))
        list(pool.map(train, [cell for cell in planned if is_finished(cell.start(out))]))


def main() -> None:
    """List findings, run one, or write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "findings")
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("list", help="print the findings, each with the number of its runs")
    running = actions.add_parser("run", help="run a finding, or continue it")
    running.add_argument("name", choices=FINDINGS)
    running.add_argument("--seeds", type=int, default=5)
    running.add_argument("--jobs", type=int, default=2, help="runs at once, one thread each")
    reporting = actions.add_parser("report", help="write the page from the finished runs")
    reporting.add_argument("--page", type=Path, default=ROOT / "docs" / "findings.md")
    args = parser.parse_args()
    out = args.out.absolute()
    if args.action == "list":
        for name, finding in FINDINGS.items():
            print(
                f"{name}: {finding.question} {len(finding.arms)} arms, {finding.iterations} iterations"
            )
    elif args.action == "run":
        run(args.name, out, seeds=args.seeds, jobs=args.jobs)
    else:
        from findings_report import write_report

        write_report(FINDINGS, cells, out=out, page=args.page)


if __name__ == "__main__":
    main()
