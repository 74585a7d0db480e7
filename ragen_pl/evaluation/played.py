"""The held-out episodes of runs and evaluations as they have written them, and whether two have played the same ones.

Nothing is played and no model is loaded. The folders may be somebody else's: only plain files inside them are read, of
a limited size, as data.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from ragen_pl.base import records
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count, CountOrZero, Seed, did_you_mean, path_override
from ragen_pl.base.foreign_files import PlainLoader, is_inside, plain_json, settings_text
from ragen_pl.base.settings_files import FIRST, newest_settings
from ragen_pl.config.environments import env_settings
from ragen_pl.config.errors import ConfigError, config_errors
from ragen_pl.config.nodes import leaves
from ragen_pl.evaluation.report import JSON, POLICY
from ragen_pl.metrics.paired import RESAMPLES
from ragen_pl.tracking.checkpoints import group_of, text_of
from ragen_pl.viewing import validations
from ragen_pl.viewing.run_files import find_runs
from ragen_pl.viewing.validations import Cost, Outcome, Validation

# bytes of evaluation.json, and of the records of a validation set
_MAX_BYTES, _MAX_BYTES_OF_RECORDS = 1 << 26, 1 << 29
# settings of `env` that change no episode
_NOT_OF_EPISODES = ("name", "timeout_s", "workers", "process", "memory_mb")
# how a validation of a run plays
_GREEDY: dict[str, Any] = {"greedy": True, "samples": 1, "temperature": None, "truncation": {}}

# group of the initial state, member and seed of an episode
Key = tuple[int, int]


@checked
@dataclass(frozen=True, kw_only=True)
class Question:
    """Settings of a comparison.

    Attributes:
        which: Validation of a run: `last`, `best`, or the number of iterations before it.
        set: Name of the validation set.
        may_differ: Settings of the episodes that may differ between the runs, such as `env.max_turns`.
        overlap: Whether initial states are compared too that training may have used.
        resamples: Resamples of the bootstrap.
        seed: Seed of the bootstrap.
    """

    which: Literal["last", "best"] | CountOrZero = "last"
    set: str = "held_out"
    may_differ: Sequence[str] = ()
    overlap: bool = False
    resamples: Count = RESAMPLES
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """The episodes of one run.

    Attributes:
        place: The folder as it was named.
        folder: The run's folder, None for that of an evaluation.
        file: What was read.
        seed: Seed of the run, None where it is unknown.
        panel: Settings that the episodes depend on, by dotted key.
        disjoint: Whether training had none of the initial states.
        outcomes: The episodes by seed of the initial state and member.
        cost: What the run had taken, empty for an evaluation.
        counts_characters: Whether its response tokens are characters, as those of a model behind an API.
    """

    place: str
    folder: Path | None
    file: Path
    seed: int | None
    panel: dict[str, Any]
    disjoint: bool
    outcomes: dict[Key, Outcome]
    cost: dict[str, float] = field(default_factory=dict)
    counts_characters: bool = False


def read_played(place: str, question: Question, *, key: str) -> Played:
    """Return the episodes of a run or an evaluation.

    Args:
        place: Its folder.
        question: Which validation.
        key: The setting that names the folder, for error messages.

    Raises:
        ConfigError: There are none, or they can't be read.
    """
    folder, named = Path(place).expanduser().absolute(), f"{key}={place}"
    if Path(question.set).name != question.set:
        raise ConfigError(f"set={question.set}: expected the name of a validation set")
    with config_errors(named, hint="give the folder of a run or an evaluation of ragen_pl"):
        if is_inside(folder, folder / JSON):
            return _of_evaluation(place, folder, question, named=named)
        if (folder / FIRST).is_file():
            return _of_run(place, folder, question, named=named)
    below = list(find_runs(folder)) if folder.is_dir() else []
    remedy = f"below it is {key}={folder / below[0]}" if below else "give one of them"
    raise ConfigError(
        f"{named}: neither the folder of a run (config.yaml) nor of an evaluation (evaluation.json); {remedy}"
    )


def _of_run(place: str, folder: Path, question: Question, *, named: str) -> Played:
    file = newest_settings(folder)
    if not is_inside(folder, file):
        raise ConfigError(f"{named}: {file} is a link that leads out of the folder")
    settings = yaml.load(settings_text(file), Loader=PlainLoader)
    env, validation = (group_of(settings, name, file=file) for name in ("env", "validation"))
    files = validations.validation_files(folder, question.set)
    if not files:
        kept = sorted(one.name for one in (folder / validations.FOLDER).glob("*"))
        remedy = (
            f"it has set={text_of(kept[0])}" if kept else f"evaluate it: {_evaluation_of(place)}"
        )
        raise ConfigError(
            f"{named}: the run has kept no validation of {question.set} in {validations.FOLDER}/; {remedy}"
        )
    chosen = _chosen(files, question, named=named)
    content = validations.read_validation(files[chosen])
    mixed = "environments" in env
    if mixed:
        own = group_of(env, "environments", question.set, file=file)
        env, validation = env_settings(own), group_of(own, "validation", file=file)
    held_out = validation.get("held_out") is True or env.get("held_out_fraction") is not None
    seed = settings.get("seed")
    return Played(
        place=place,
        folder=folder,
        file=files[chosen],
        seed=seed if isinstance(seed, int) else None,
        panel=_panel(env) | {"key": "held_out", "options": None} | _GREEDY,
        # the validation sets of a mixture are named after its environments
        disjoint=held_out and (mixed or question.set == "held_out"),
        outcomes=_by_key(content["episodes"], file=files[chosen]),
        cost={"iterations": float(chosen), **_numbers(content["cost"])},
    )


def _chosen(files: Mapping[int, Path], question: Question, *, named: str) -> int:
    """Return the iterations before the validation that is asked for."""
    if question.which == "last":
        return max(files)
    if question.which == "best":
        scores = {
            number: _score(validations.read_validation(file)) for number, file in files.items()
        }
        return max(scores, key=lambda number: (*scores[number], -number))
    if question.which not in files:
        raise ConfigError(
            f"which={question.which}: {named} has validations after {', '.join(map(str, files))} iterations; give one "
            "of them, last or best"
        )
    return question.which


def _score(validation: Validation) -> tuple[float, float]:
    counted = [one for one in validation["episodes"] if one["status"] != "failed"]
    if not counted:
        return -1.0, 0.0
    successes = sum(one["success"] for one in counted) / len(counted)
    return successes, sum(one["return"] for one in counted) / len(counted)


def _of_evaluation(place: str, folder: Path, question: Question, *, named: str) -> Played:
    file = folder / JSON
    if file.stat().st_size > _MAX_BYTES:
        raise ConfigError(f"{file}: larger than {_MAX_BYTES} bytes")
    content = plain_json(file.read_bytes())
    about, sets = (group_of(content, name, file=file) for name in ("about", "validation_sets"))
    if question.set not in sets:
        raise ConfigError(
            f"set={question.set}: {named} has {', '.join(map(text_of, sets))}; give one of them"
        )
    played = group_of(sets, question.set, file=file)
    rows = folder / question.set / records.FILE
    if not is_inside(folder, rows):
        raise ConfigError(
            f"{named}: the evaluation has no {question.set}/{records.FILE}; evaluate with trajectories=true"
        )
    if rows.stat().st_size > _MAX_BYTES_OF_RECORDS:
        raise ConfigError(f"{rows}: larger than {_MAX_BYTES_OF_RECORDS} bytes")
    policies, outcomes = set(), []
    for record in records.read_records(rows):
        policies.add(record.get("policy"))
        outcomes.append(_outcome_of(record))
    protocol = {name: about.get(name) for name in _GREEDY}
    trained = POLICY in policies and about.get("checkpoint") != "untrained"
    return Played(
        place=place,
        folder=None,
        file=rows,
        seed=None,
        panel=_panel(group_of(played, "env", file=file))
        | {name: played.get(name) for name in ("key", "options")}
        | protocol,
        disjoint=not trained or played.get("set_aside") == played.get("initial_states"),
        outcomes=_by_key(outcomes, file=rows),
        counts_characters=policies != {POLICY},
    )


def _numbers(cost: Cost) -> dict[str, float]:
    return {
        "episodes": cost["episodes"],
        "response_tokens": cost["response_tokens"],
        "seconds": cost["seconds"],
        "processor_seconds": cost["processor_seconds"],
    }


def _evaluation_of(place: str) -> str:
    given = shlex.quote(path_override("ckpt", place))
    return f"python -m ragen_pl.evaluate {given} to=FOLDER, and give that folder"


def _panel(env: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in env.items() if name not in _NOT_OF_EPISODES}
    return dict(leaves(kept, prefix="env.", lists=False))


def _by_key(outcomes: Iterable[Outcome], *, file: Path) -> dict[Key, Outcome]:
    found: dict[Key, Outcome] = {}
    for outcome in outcomes:
        key = outcome["seed"], outcome["member"]
        if key in found and found[key]["group"] != outcome["group"]:
            raise ConfigError(
                f"{file}: has an episode for each seat of a game, and a comparison takes episodes of one seat; "
                "validate against a scripted player, such as by env.kwargs.validation_opponent"
            )
        if key in found:
            raise ConfigError(f"{file}: seed {key[0]} and member {key[1]} are there twice")
        found[key] = outcome
    if not found:
        raise ConfigError(f"{file}: there are no episodes in it")
    return found


# ---- whether they can be compared


def check_comparable(sides: Sequence[Sequence[Played]], question: Question) -> None:
    """Check that all runs have played the same episodes, which training had none of.

    Raises:
        ConfigError: With the first thing that is wrong.
    """
    first, *others = played = [one for side in sides for one in side]
    files = [one.file.resolve() for one in played]
    for one, file in zip(played, files, strict=True):
        if files.count(file) > 1:
            raise ConfigError(f"{one.place}: it is named twice ({file}); give another run")
    known = {key for one in played for key in one.panel}
    for key in question.may_differ:
        if not named_by(known, [key]):
            raise ConfigError(
                f"may_differ={key}: no such setting{did_you_mean(key, sorted(known))}"
            )
    for other in others:
        _check_panels(first, other, question)
    for one in played:
        if not (one.disjoint or question.overlap):
            raise ConfigError(
                f"{one.place}: training may have used initial states of set={question.set}; train with "
                "validation.held_out=true and compare set=held_out, or set overlap=true"
            )


def named_by(keys: Iterable[str], names: Sequence[str]) -> set[str]:
    """Return the keys that are one of some names, or below one of them."""
    return {key for key in keys if any(f"{key}.".startswith(f"{name}.") for name in names)}


def differing(one: Played, other: Played) -> dict[str, tuple[Any, Any]]:
    """Return the settings of episodes that differ between two runs, with both values."""
    keys = sorted(one.panel.keys() | other.panel.keys())
    pairs = {key: (one.panel.get(key), other.panel.get(key)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _check_panels(one: Played, other: Played, question: Question) -> None:
    found = differing(one, other)
    wrong = sorted(found.keys() - named_by(found, question.may_differ))
    if wrong:
        value, another = map(text_of, found[wrong[0]])
        raise ConfigError(
            f"{one.place} has {text_of(wrong[0])}={value} and {other.place} {another}, so they have played other "
            f"episodes; compare runs with the same settings, or allow it: may_differ=[{text_of(','.join(wrong))}]"
        )
    if missing := one.outcomes.keys() ^ other.outcomes.keys():
        raise ConfigError(
            f"{one.place} has {len(one.outcomes)} episodes and {other.place} {len(other.outcomes)}, {len(missing)} of "
            "them with a seed that the other has not; evaluate both with the same validation.episodes"
        )
    for episode, outcome in one.outcomes.items():
        states = outcome["state"], other.outcomes[episode]["state"]
        if None not in states and states[0] != states[1]:
            raise ConfigError(
                f"{one.place} and {other.place}: the episodes of seed {episode[0]} begin in other states; compare "
                "runs of the same version of the environment"
            )


def _outcome_of(record: Mapping[str, Any]) -> Outcome:
    """Return how an episode of `ragen_pl.base.records` ended.

    Raises:
        ValueError: A value has another type.
    """
    outcome = {
        **{name: record.get(name) for name in ("group", "member", "seed", "status", "success")},
        "state": record.get("initial_state"),
        "return": record.get("return"),
        "turns": len(record["turns"]),
        "response_tokens": sum(len(turn.get("response_ids", ())) for turn in record["turns"]),
    }
    return records.checked_types(Outcome, outcome, place="record")
