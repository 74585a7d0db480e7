"""The trajectory page: one file, the content of its records, and safe against any response text."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.runs.called_commands import caller
from support.servers.browser import browse, in_browser, record

from ragen_pl.base.records import write_records
from ragen_pl.trajectory import Span
from ragen_pl.viewing.page import PLAYED, outcomes, page_html, write_page

NASTY = (
    "</script><script>document.title='owned'</script>"
    "<img src=x onerror=\"document.title='owned'\">{{data}}\u202e\x07é"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    Image.fromarray(np.full((4, 4, 3), 200, np.uint8)).save(tmp_path / "images" / "a.png")
    return tmp_path


class Reader(HTMLParser):
    """Collector of what a browser would run or load, and of the page's data."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.scripts: list[str] = []
        self.data = ""
        self._inside: dict[str, str | None] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.loads += [
            f"{tag} {name}" for name in given if name in ("src", "href") or name.startswith("on")
        ]
        if tag == "script":
            self._inside = given

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside is None:
            return
        if self._inside.get("id") == "data":
            self.data += data
        else:
            self.scripts.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    return reader


def test_page_is_self_contained(folder: Path) -> None:
    page = page_html([record(0), record(1)], title="a run", images=folder)
    reader = read(page)
    data = json.loads(reader.data)
    assert reader.loads == [] and len(reader.scripts) == 1
    assert "default-src 'none'" in page and not re.search(r"(https?:)?//[a-z]+\.", page)
    assert list(data["images"]) == ["images/a.png"]  # once, although several turns show it
    assert data["images"]["images/a.png"].startswith("data:image/png;base64,")
    assert data["episodes"][0]["turns"][0]["advantages"] == [1.0, -2.0, 0.0, 0.5]
    assert data["episodes"][0]["seed"] == str(2**60 + 1)
    assert data["spans"][Span.PREDICTION] == "prediction"


def test_response_text_is_not_markup(folder: Path) -> None:
    page = page_html(
        [record(0, response=NASTY, response_pieces=[NASTY, "", "", ""], prompt_text=NASTY)],
        title=NASTY,
        images=folder,
    )
    reader = read(page)
    turn = json.loads(reader.data)["episodes"][0]["turns"][0]
    assert (
        reader.loads == []
        and len(reader.scripts) == 1
        and turn["response"] == NASTY == turn["prompt_text"]
    )


def test_page_shows_nan_and_infinity_as_null(folder: Path) -> None:
    values = [math.nan, math.inf, 1 / 3, 0.0]
    data = json.loads(read(page_html([record(0, values=values)], title="t", images=folder)).data)
    assert data["episodes"][0]["turns"][0]["values"] == [None, None, 0.33333, 0.0]


def test_page_leaves_out_missing_images(tmp_path: Path) -> None:
    data = json.loads(read(page_html([record(0)], title="t", images=tmp_path)).data)
    assert data["images"] == {"images/a.png": None}


def test_a_record_gets_no_other_files_than_its_images(folder: Path, tmp_path_factory) -> None:
    """Records may be somebody else's and name any file."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    secret = elsewhere / "secret.png"
    shutil.copy(folder / "images" / "a.png", secret)
    (folder / "images" / "link.png").symlink_to(secret)
    (folder / "linked").symlink_to(elsewhere)
    (folder / "images" / "text.png").write_text("no image")
    (folder / "images" / "cut.png").write_bytes((folder / "images" / "a.png").read_bytes()[:40])
    Image.new("L", (4, 4)).save(folder / "images" / "picture.gif")
    Image.new("1", (8192, 4096)).save(folder / "images" / "large.png")
    os.mkfifo(folder / "images" / "pipe.png")
    outside = os.path.relpath(secret, folder)
    names = [
        str(secret), outside, "/etc/hostname", "images/link.png", "linked/secret.png", "images/text.png",
        "images/cut.png", "images/picture.gif", "images/large.png", "images/pipe.png", "images", "", "\x00",
        "images/none.png", "a" * 5000,
    ]  # fmt: skip
    page = page_html([record(0, images=["images/a.png", *names])], title="t", images=folder)
    images = json.loads(read(page).data)["images"]
    assert images.pop("images/a.png").startswith("data:image/png;base64,")
    assert images == dict.fromkeys(names)


def test_page_of_a_sample_keeps_groups_whole(folder: Path) -> None:
    records = [record(group, member=member) for group in range(10) for member in range(4)]
    data = json.loads(read(page_html(records, title="t", images=folder, episodes=7)).data)
    shown = [(episode["group"], episode["member"]) for episode in data["episodes"]]
    assert shown == [(group, member) for group in (0, 5) for member in range(4)]
    assert data["note"] == "8 of 40 episodes, whole groups"
    assert data["totals"] == {"episodes": 40, "success": 40, "failed": 0}
    assert data["order"] == "as played"
    assert json.loads(read(page_html(records, title="t", images=folder)).data)["note"] == ""


def test_environments_of_a_mixture_have_groups_of_their_own(folder: Path) -> None:
    lake = [record(group) | {"environment": "lake"} for group in range(3)]
    bandit = [record(group, success=False) | {"environment": "bandit"} for group in range(3)]
    data = shown([*lake, *bandit], folder, episodes=6)
    assert len({episode["row"] for episode in data["episodes"]}) == 6
    # half of the page is of episodes without success
    kept = shown([*lake, *bandit], folder, episodes=4)["episodes"]
    assert [episode["environment"] for episode in kept] == ["lake"] * 2 + ["bandit"] * 2


def shown(records: list[dict[str, Any]], folder: Path, *, episodes: int) -> dict[str, Any]:
    data = json.loads(read(page_html(records, title="t", images=folder, episodes=episodes)).data)
    data["groups"] = [episode["group"] for episode in data["episodes"]]
    return data


def test_page_of_a_sample_shows_what_went_wrong(folder: Path) -> None:
    lost = {3, 8, 17}
    records = [record(group, success=group not in lost) for group in range(40)]
    records[8]["status"], records[8]["error"] = "failed", "OSError: gone"
    data = shown(records, folder, episodes=10)
    assert lost < set(data["groups"]) and len(data["groups"]) == 10
    assert data["note"] == "10 of 40 episodes, whole groups, with 3 of the 3 without success"
    assert data["totals"] == {"episodes": 40, "success": 37, "failed": 1}
    # of many that went wrong no more than half
    records = [record(group, success=group % 4 == 0) for group in range(40)]
    data = shown(records, folder, episodes=10)
    assert sum(group % 4 == 0 for group in data["groups"]) == 5 == len(data["groups"]) // 2
    assert "5 of the 30 without success" in data["note"]
    # those of an agent that never succeeds fill the page
    records = [record(group, success=group == 7) for group in range(40)]
    assert 7 in shown(records, folder, episodes=10)["groups"]
    assert len(shown(records, folder, episodes=10)["groups"]) == 10


def test_a_page_of_records_that_are_a_sample_states_the_numbers_of_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [record(group, success=False) for group in range(4)]
    write_records(records, folder)
    call = caller(monkeypatch, capsys)
    played = {"episodes": 256, "success": 250, "failed": 1}
    for text, totals in ((json.dumps(played), played), ("[]", outcomes([("", False)] * 4))):
        (folder / PLAYED).write_text(text)
        assert call("page", f"records={folder}").code == 0
        data = json.loads(read((folder / "page.html").read_text()).data)
        assert data["totals"] == totals


@in_browser
@pytest.mark.slow
def test_browser_draws_page_and_filters(folder: Path) -> None:
    records = [
        record(0), record(0, member=1, success=False), record(1, success=False, valid=False), record(2, turns=5),
        record(3, response=NASTY, response_pieces=[NASTY, "", "", ""]),
    ]  # fmt: skip
    page = write_page(records, folder / "page.html", title="a <b>run</b>")
    drawn = browse(page)
    assert "5 of 5 episodes" in drawn and drawn.count('<article class="episode">') == 5
    assert "<title>a &lt;b&gt;run" in drawn and "owned" in drawn and '<img src="x"' not in drawn
    assert "⟨U+202E⟩" in drawn and "⟨U+0007⟩" in drawn
    assert re.search(
        r'class="token think in-loss in-advantage"[^>]*advantage -2\.000[^>]*--minus\) 72%', drawn
    )
    for view, count in {
        "outcome=success": 3, "outcome=no+success": 2, "invalid=some+invalid": 1, "min=3": 1, "max=2": 4,
        "text=owned": 1,
    }.items():  # fmt: skip
        assert f"{count} of 5 episodes" in browse(page, view=view), view
    assert '<main id="groups" class="masks-both">' in browse(page, view="masks=both")


@in_browser
@pytest.mark.slow
def test_browser_puts_what_went_wrong_in_an_evaluation_first(folder: Path) -> None:
    records = [record(0), record(1, success=False), record(2), record(3, success=False)]
    records[3] |= {"status": "failed", "error": "OSError: gone"}
    for one in records:
        one["validation_set"] = "held_out"
    page = write_page(records, folder / "page.html", title="evaluation")
    drawn = browse(page)
    assert re.findall(r"group (\d)</h3>", drawn) == ["3", "1", "0", "2"]
    assert "success 2 of 3 · 1 failed" in drawn and "⚠ failed" in drawn
    assert "1 of 4 episodes" in browse(page, view="outcome=failed")
    assert "1 of 4 episodes" in browse(page, view="outcome=no+success")


@in_browser
@pytest.mark.slow
def test_browser_runs_only_the_script_of_the_page(folder: Path) -> None:
    page = write_page([record(0)], folder / "page.html", title="run")
    text = page.read_text().replace("<main ", "<script>document.title='owned'</script><main ")
    page.write_text(text)
    assert "<title>run</title>" in browse(page)


@in_browser
@pytest.mark.slow
def test_browser_puts_groups_of_one_into_a_grid(folder: Path) -> None:
    single = write_page([record(group) for group in range(3)], folder / "single.html", title="run")
    drawn = browse(single)
    assert drawn.count('<section class="singles">') == 1 and '<div class="members">' not in drawn
    assert [f"group {group}</h3>" in drawn for group in range(3)] == [True] * 3
    mixed = [record(0), record(1), record(2), record(2, member=1, success=False), record(3)]
    drawn = browse(write_page(mixed, folder / "mixed.html", title="run"))
    sections = re.findall(r'<section class="(singles|group)">', drawn)
    assert sections == ["singles", "group", "singles"]
    # A filter that leaves one member of a group keeps the group's row.
    drawn = browse(folder / "mixed.html", view="outcome=success")
    assert re.findall(r'<section class="(singles|group)">', drawn) == sections


@in_browser
@pytest.mark.slow
def test_browser_fills_the_width_with_groups_of_one(folder: Path) -> None:
    page = write_page([record(group) for group in range(6)], folder / "page.html", title="run")
    image = folder / "page.png"
    browse(page, "--window-size=1500,900", "--hide-scrollbars", f"--screenshot={image}")
    pixels = np.asarray(Image.open(image).convert("L")).astype(int)
    right = pixels[300:700, 1200:]
    assert right.std() > 5, "the right part of the page is empty"
