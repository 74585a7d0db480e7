"""The benchmark of families, on a small sample of what it runs: exact, refused in one line, and resumed."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

# another module of the tests has the file's name
SPEC = importlib.util.spec_from_file_location(
    "families_benchmark", Path(__file__).parents[2] / "benchmarks" / "families.py"
)
assert SPEC is not None and SPEC.loader is not None
families_benchmark = importlib.util.module_from_spec(SPEC)
sys.modules["families_benchmark"] = families_benchmark
SPEC.loader.exec_module(families_benchmark)
run, load, main = families_benchmark.run, families_benchmark.load, families_benchmark.main
Result, EXACT = families_benchmark.Result, families_benchmark.EXACT

WITH_IMAGES = (
    # what its processor gives besides pixels
    "ernie4_5_vl_moe",
    # a logit scale in the text config that the class does not apply
    "aya_vision", "cohere2_vision", "granite_vision",
    # features by the base model only; by arguments that the wrapper does not name
    "janus", "video_llama_3",
    # positions without types of tokens; types that are given only if asked for; sizes by another name
    "qwen2_5_omni_thinker", "cosmos3_edge", "minicpmv4_7",
    # features by decoder layer; hidden states besides; tokens of the text of images
    "granite4_vision", "deepseek_vl_hybrid", "idefics3",
)  # fmt: skip
TEXT = (
    # multiplies its logits by what Granite divides by
    "hyperclovax",
    # no attention layer; layers that cannot be checkpointed; its own base model; a text model among those with images
    "mamba", "ctrl", "llama4_text", "mistral4",
)  # fmt: skip
# earlier versions of transformers may give no encoded images of these
SINCE = {"qwen2_5_omni_thinker": Version("5.23")}
REFUSED = {
    "ovis2": r"^model\.build: transformers' ovis2 gives image features of a kind of its own \(visual_indicator",
    "idefics2": r"^model\.build: the processor of idefics2 does not read arrays .* as others do; choose another model$",
    "hunyuan_vl": r"^model\.build\.path=hunyuan_vl: .* 4 axes",
    "llama4": r"^model\.build\.path=llama4: .* takes no encoded images",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "images"), [*((n, True) for n in WITH_IMAGES), *((n, False) for n in TEXT)]
)
def test_families_are_exact(name: str, images: bool) -> None:
    result = run(name, images=images, seconds=120)
    if name in SINCE and Version(transformers.__version__) < SINCE[name] and result.reason:
        assert "takes no encoded images" in result.reason
        return
    assert result.reason is None and result.largest is not None and result.largest <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_with_the_reason(name: str) -> None:
    result = run(name, images=True, seconds=120)
    assert result.largest is None and re.search(REFUSED[name], str(result.reason))


def test_a_process_that_takes_too_long_is_a_result() -> None:
    result = run("llama", images=False, seconds=0)
    assert result.reason is not None and "processor time" in result.reason


def test_results_are_kept_and_the_table_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "models.md"
    page.write_text("before\n<!-- families: begin -->\nold\n<!-- families: end -->\nafter\n")
    monkeypatch.setattr(families_benchmark, "RESULTS", tmp_path / "families.json")
    monkeypatch.setattr(families_benchmark, "PAGE", page)
    families_benchmark.save(
        {
            "one": Result(transformers="5", images=False, engine=1e-6, trainer=2e-6),
            "two": Result(transformers="5", images=False, engine=2e-4, trainer=2e-6),
            "six": Result(transformers="5", images=True, reason="model.build: a | b"),
        }
    )
    main(["--table"])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("<!-- families: end -->\nafter\n")
    assert "(1): one." in text and "| two | runs: the engine differs by 2.0e-04" in text
    assert "| six | refused: a \\| b |" in text and "old" not in text
    assert set(load()) == {"one", "two", "six"}
