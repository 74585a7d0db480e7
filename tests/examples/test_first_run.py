"""The notebook of a first run, executed in a kernel of its own."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_run.ipynb"


@pytest.mark.slow
def test_the_notebook_trains_an_environment_of_a_cell(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=None, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    displayed = [output.get("data", {}) for output in outputs]
    shown = "".join(output.get("text", "") for output in outputs)
    shown += "".join(data.get("text/plain", "") for data in displayed)
    assert "success on new initial states: 1.00" in shown
    # the table of the summary, with the random player, and how to go on in Python
    assert "random" in shown and "return" in shown
    assert "ragen_pl.train(…, ckpt_path=" in shown and "ragen_pl.fit" not in shown
    assert any("image/png" in data for data in displayed)
    assert (tmp_path / "runs" / "__main__.Market").is_dir()
