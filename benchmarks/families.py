"""Which families of transformers train exactly: log-probs three ways, of a tiny random model of each.

The model's own forward with every output of its own processor, the in-process engine and the trainer, over turns with
images of two sizes and a turn without one (`tests/support/models/compared_logprobs.py`). Each family runs in a process
of its own with a limit of processor time. Results are kept in `benchmarks/families.json`, so a run that was stopped
goes on where it ended, and `docs/models.md` gets their table.

    python benchmarks/families.py                 # families without a result of the installed transformers
    python benchmarks/families.py --again NAME …  # these families
    python benchmarks/families.py --table         # the table of what is there
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import transformers
from rich.progress import track

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT / "tests") not in sys.path:
    sys.path.insert(0, str(ROOT / "tests"))

from support.models.compared_logprobs import own_logprobs, play, trainer_logprobs  # noqa: E402
from support.models.tiny_families import PROCESSORS, known_families, tiny_bundle  # noqa: E402

from ragen_pl.config.errors import in_one_line  # noqa: E402
from ragen_pl.models.facts import family_failure  # noqa: E402

RESULTS = ROOT / "benchmarks" / "families.json"
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- families: begin -->\n", "<!-- families: end -->"
# nats: largest difference of a family that is called exact
EXACT = 5e-5
# limit of the start check in float32
REFUSED = 1e-3


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a family.

    Attributes:
        transformers: Version of transformers.
        images: Whether prompts showed images.
        engine: Largest difference of the engine from the model's own forward, in nats; None if it did not run.
        trainer: The same of the trainer.
        reason: Why it did not run; None if it did.
    """

    transformers: str
    images: bool
    engine: float | None = None
    trainer: float | None = None
    reason: str | None = None

    @property
    def largest(self) -> float | None:
        """The larger one of the differences."""
        if self.engine is None or self.trainer is None:
            return None
        return max(self.engine, self.trainer)


def measure(name: str, *, images: bool) -> tuple[float, float]:
    """Return the largest differences of the engine and the trainer from the model's own forward, in nats."""
    bundle = tiny_bundle(name, images=images)
    episodes = play(bundle, window="all", keep=True)
    said = [each for episode in episodes for each in episode]
    own = [own_logprobs(bundle, each) for each in said]
    engine = max(
        float(np.abs(expected - each.generation.logprobs).max())
        for expected, each in zip(own, said, strict=True)
    )
    trainer = max(
        float(np.abs(scored - np.concatenate(own)).max())
        for _, scored in trainer_logprobs(bundle, episodes)
    )
    return engine, trainer


def _in_child(name: str, images: bool, seconds: int, pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    warnings.simplefilter("ignore")
    found: dict[str, object]
    try:
        engine, trainer = measure(name, images=images)
        found = {"engine": engine, "trainer": trainer}
    # whatever a family leads to is its result
    except Exception as error:
        found = {"reason": family_failure(error) or in_one_line(error, longest=300)}
    pipe.send(found)


def run(name: str, *, images: bool, seconds: int) -> Result:
    """Measure a family in a process of its own.

    Args:
        name: Name of the family.
        images: Whether prompts show images.
        seconds: Limit of processor time.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_in_child, args=(name, images, seconds, theirs))
    child.start()
    theirs.close()
    try:
        found = ours.recv()
    except EOFError:
        found = {"reason": f"its process ended, or took more than {seconds} s of processor time"}
    child.join()
    return Result(transformers=transformers.__version__, images=images, **found)


def load() -> dict[str, Result]:
    """Return the results by the name of the family, ` with images` behind it where prompts show some."""
    if not RESULTS.exists():
        return {}
    return {name: Result(**values) for name, values in json.loads(RESULTS.read_text()).items()}


def save(results: dict[str, Result]) -> None:
    """Write the results."""
    values = {name: asdict(result) for name, result in sorted(results.items())}
    RESULTS.write_text(json.dumps(values, indent=1) + "\n")


def table(results: dict[str, Result]) -> str:
    """Return the tables of the page."""
    exact, others, unknown = [], [], []
    for name, result in sorted(results.items()):
        if result.largest is not None and result.largest <= EXACT:
            exact.append(name)
        elif result.largest is not None:
            verdict = "runs" if result.largest <= REFUSED else "refused"
            others.append(f"| {name} | {verdict}: the engine differs by {result.engine:.1e} nats, the trainer by "
                          f"{result.trainer:.1e} |")  # fmt: skip
        elif str(result.reason).startswith("model.build"):
            reason = str(result.reason).partition(": ")[2].replace("|", "\\|")
            others.append(f"| {name} | refused: {reason} |")
        else:
            unknown.append(f"| {name} | {str(result.reason).replace('|', chr(92) + '|')} |")
    versions = sorted({result.transformers for result in results.values()})
    head = "| family | found |\n|---|---|\n"
    parts = [
        f"With transformers {', '.join(versions)}. Exact to {EXACT:.0e} nats ({len(exact)}): {', '.join(exact)}.",
        "Not exact, or refused at the start of a run:\n\n" + head + "\n".join(others),
    ]
    if unknown:
        parts.append(
            "Not built tiny here, or ended by an error of transformers, which the start of a run shows as its refusal:"
            "\n\n" + head + "\n".join(unknown)
        )
    return "\n\n".join(parts) + "\n"


def write_page(results: dict[str, Result]) -> None:
    """Write the table into the page."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + table(results) + END + after)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure families and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--seconds", type=int, default=30, help="processor time of a family")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = load()
    wanted = [(name, True) for name in PROCESSORS] + [(name, False) for name in known_families()]
    if options.table:
        wanted = []
    for name, images in track(wanted):
        key = f"{name} with images" if images else name
        known = results.get(key)
        if options.again and name not in options.again:
            continue
        if not options.again and known and known.transformers == transformers.__version__:
            continue
        results[key] = run(name, images=images, seconds=options.seconds)
        save(results)
    write_page(results)


if __name__ == "__main__":
    main()
