"""The judge of `make soak-memory` fails on each kind of growth, and on nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from module_process import ROOT, run_module

HERE = Path(__file__).parent
LIMIT_S = 900


@pytest.mark.slow
def test_growth_on_purpose_is_found(tmp_path: Path) -> None:
    code, output = run_module(
        str(HERE / "leaking.py"),
        [],
        folder=tmp_path,
        paths=(HERE, ROOT / "tests", ROOT / "tests" / "run", ROOT),
        timeout=LIMIT_S,
    )
    assert code == 0, output
    failing = json.loads(output.splitlines()[-1])
    assert failing.pop("nothing") == []
    for leak, found in failing.items():
        assert any(name.removeprefix("least ").startswith(leak) for name in found), (leak, found)
