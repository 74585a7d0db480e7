"""The gallery shows a run's recorded episodes before and after RL, and refuses a run that it would misdescribe."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image
from support.servers.browser import record

from ragen_pl.config.composition import compose_overrides
from ragen_pl.tracking.mlflow_run import version_tags

ROOT = Path(__file__).parents[2]
OVERRIDES = ("env=frozenlake_visual", "validation.episodes=6", "callbacks.trajectories.count=6")
HOSTILE = "<img src=x onerror=alert(1)> | `a` [b](javascript:c)\n\u202e"


@pytest.fixture
def gallery(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gallery

    return gallery


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder, with what the page is made of: settings, commit and records of two validations."""
    folder = tmp_path / "run"
    for iterations, changes in (0, {"turns": 3, "success": False}), (8, {"turns": 2}):
        place = folder / "trajectories" / f"validation_{iterations:04d}"
        (place / "images").mkdir(parents=True)
        Image.fromarray(np.full((4, 4, 3), iterations, np.uint8)).save(place / "images/a.png")
        records = [record(group, **changes) for group in range(6)]
        if iterations:
            records[1] |= {"success": False, "status": "turn_limit", "return": 0.0}
            records[3]["turns"][0] |= {"valid": False, "response": HOSTILE}
            records[3]["turns"][1] |= {"think": HOSTILE}
        lines = [json.dumps(one) + "\n" for one in records]
        (place / "trajectories.jsonl").write_text("".join(lines))
    OmegaConf.save(compose_overrides("fit", list(OVERRIDES)), folder / "config.yaml", resolve=True)
    tags = version_tags(checkout=ROOT) | {"git.commit": "0123456789abcdef", "git.changed": "false"}
    (folder / "mlflow").mkdir()
    call = json.dumps({"call": "start", "experiment": "x", "name": "y", "tags": tags})
    (folder / "mlflow" / "calls.jsonl").write_text(call + "\n")
    return folder


def test_the_page_has_each_turn_before_and_after_rl(gallery, run, tmp_path):
    """Two initial states evenly spaced, and the first one that fails after RL; all texts are shown as they are."""
    # an image of an earlier page
    (tmp_path / "gallery").mkdir()
    (tmp_path / "gallery" / "0123.png").touch()
    gallery.write_page(run, OVERRIDES, tmp_path / "gallery.md", states=2, factor=2)
    text = (tmp_path / "gallery.md").read_text()
    assert "RUN " + " ".join(OVERRIDES) in text and "at commit `0123456789ab`, in" in text
    assert (
        "and after\n8 iterations of RL. It succeeds in 0 of 6 episodes before RL, and in 5" in text
    )
    assert re.findall(r"^## Initial state (\d+)$", text, re.M) == ["0", "3", "1"]
    rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in re.findall(r"^\| (?:\d|end) \|.*\|$", text, re.M)
    ]
    assert [row[0] for row in rows] == ["1", "2", "3", "end"] * 3
    assert all(len(row) == 3 for row in rows) and rows[2][2] == ""
    assert [row[1:] for row in rows if row[0] == "end"] == [
        ["terminated, return 0.00", "success, return 1.00"],
        ["terminated, return 0.00", "success, return 1.00"],
        ["terminated, return 0.00", "turn limit, return 0.00"],
    ]
    shown = r"\<img src\=x onerror\=alert\(1\)\> \| \`a\` \[b\]\(javascript\:c\)⟨U+000A⟩⟨U+202E⟩"
    image = "![image of the observation](gallery/"
    assert rows[4][2].startswith(image) and rows[4][2].endswith(f"<br>{shown}<br>no valid action")
    assert rows[5][2].endswith(f"<br>{shown}<br>**Up**")
    named = set(re.findall(r"\]\((gallery/\w+\.png)\)", text))
    files = list((tmp_path / "gallery").iterdir())
    assert named == {f"gallery/{file.name}" for file in files} and len(files) == 2
    for file in files:
        with Image.open(file) as image:
            assert image.size == (8, 8)


def test_a_run_that_the_page_would_misdescribe_is_refused(gallery, run, tmp_path):
    def message(folder: Path, *overrides: str) -> str:
        with pytest.raises(SystemExit) as refused:
            gallery.write_page(folder, overrides, tmp_path / "page.md", states=2, factor=1)
        return str(refused.value)

    other = [*OVERRIDES[:-1], "callbacks.trajectories.count=5", "seed=1"]
    assert message(run, *other).endswith(
        "no run of these overrides: callbacks.trajectories.count, model.build.seed, seed differ"
    )
    (run / "mlflow" / "calls.jsonl").unlink()
    assert "has noted no commit" in message(run, *OVERRIDES)
    records = run / "trajectories" / "validation_0008" / "trajectories.jsonl"
    records.write_text("".join(records.read_text().splitlines(keepends=True)[:5]))
    assert "train with callbacks.trajectories.count=6" in message(run, *OVERRIDES)
    shutil.rmtree(records.parent)
    assert "has recorded 1 validations" in message(run, *OVERRIDES)
    assert not (tmp_path / "page.md").exists()
