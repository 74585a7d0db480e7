"""Loading a model's folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.families import FAMILIES
from support.models.family_models import tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    AutoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PaliGemmaProcessor,
    PreTrainedTokenizerFast,
    SiglipImageProcessor,
)

from ragen_pl.models.build import load_pretrained
from ragen_pl.models.vision_parts import vision_weights

ROLLUP = Path("/proc/self/smaps_rollup")


def anonymous_bytes() -> int:
    """Return the bytes of this process's memory that are not a file's."""
    kilobytes = re.search(r"Anonymous: +(\d+) kB", ROLLUP.read_text())
    return 1024 * int(kilobytes[1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder with two layers."""
    tiny("llama3_2").save(tmp_path)
    return tmp_path


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Change the tensors in a folder's file of weights and return the folder."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})
    return folder


NORM = "model.norm.weight"


def test_weights_that_a_folder_lacks_are_not_drawn(folder):
    load_pretrained(str(folder))
    rewritten(folder, lambda weights: weights.pop(NORM))
    with pytest.raises(ValueError, match=rf"{folder}: its files lack 1 tensor \({NORM}\)"):
        load_pretrained(str(folder))
    rewritten(folder, lambda weights: [weights.pop(name) for name in list(weights)[:5]])
    with pytest.raises(ValueError, match=r"lack 6 tensors \(.*, …\) of the model; give the whole"):
        load_pretrained(str(folder))


def test_weights_of_other_shapes_are_not_drawn(folder, capsys):
    rewritten(folder, lambda weights: weights.update({NORM: weights[NORM][:-1].clone()}))
    with pytest.raises(ValueError, match=rf"hold {NORM} of shape \[\d+\], where the model has \["):
        load_pretrained(str(folder))
    # transformers' own report of it has many lines
    assert "LOAD REPORT" not in "".join(capsys.readouterr())


def test_tensors_that_the_model_does_not_use_are_named(folder, caplog):
    rewritten(folder, lambda weights: weights.update({"head.weight": torch.ones(2)}))
    load_pretrained(str(folder))
    assert "its files have 1 tensor (head.weight) that the model does not use" in caplog.text


@pytest.mark.skipif(not ROLLUP.exists(), reason="needs Linux's table of a process's memory")
def test_weights_are_mapped_from_the_file(tmp_path):
    config = LlamaConfig(
        vocab_size=100_000, hidden_size=256, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    size = sum(weight.nbytes for weight in model.parameters())
    model.save_pretrained(tmp_path)
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "c": 2}, "a"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="a", eos_token="b", chat_template="{{ messages }}"
    ).save_pretrained(tmp_path)
    del model
    first = load_pretrained(str(tmp_path))  # with the packages that a load imports
    before = anonymous_bytes()
    bundle = load_pretrained(str(tmp_path))
    with torch.no_grad():
        for weight in bundle.model.parameters():
            weight.sum()
    assert anonymous_bytes() - before < 0.2 * size
    assert torch.equal(bundle.model.lm_head.weight, first.model.lm_head.weight)


# a model that transformers does not have, as repositories bring it
CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_family"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_a_models_folder_is_run_only_if_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    folder = tmp_path / "model"
    tiny("llama3_2").save(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own_family",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(CODE)
    with pytest.raises(ValueError, match=r"no such model.*read them.*trust_remote_code=true"):
        load_pretrained(str(folder))
    bundle = load_pretrained(str(folder), trust_remote_code=True)
    assert type(bundle.model).__name__ == "OwnModel" and bundle.facts.family == "own_family"


def test_a_revision_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def read(path: str, **settings: Any) -> None:
        asked.update(settings)
        raise OSError("offline")

    monkeypatch.setattr(AutoConfig, "from_pretrained", read)
    with pytest.raises(FileNotFoundError, match=r"model\.build\.path=some/model: .*offline"):
        load_pretrained("some/model", revision="v1.0")
    assert asked == {"revision": "v1.0", "local_files_only": False, "trust_remote_code": False}


def test_an_encoder_that_is_shown_no_images_is_left_unchanged(tmp_path: Path) -> None:
    tiny("qwen3_vl").save(tmp_path)

    def trained(**settings: bool) -> tuple[bool, bool]:
        model = load_pretrained(str(tmp_path), **settings).model
        (vision,) = {weight.requires_grad for weight in vision_weights(model)}
        (text,) = {weight.requires_grad for weight in model.get_decoder().parameters()}
        return vision, text

    assert trained() == (True, True)
    assert trained(shows_images=False) == (False, True)
    own_choice = trained(shows_images=False, freeze_vision=False, freeze_projector=False)
    assert own_choice == (True, True)


def test_parts_of_a_model_may_have_attention_of_their_own(tmp_path: Path) -> None:
    tiny("qwen3_vl").save(tmp_path)
    attention = {"text_config": "sdpa", "vision_config": "eager"}
    config = load_pretrained(str(tmp_path), attn_implementation=attention).model.config
    found = config.text_config._attn_implementation, config.vision_config._attn_implementation
    assert found == ("sdpa", "eager")


def test_flash_attention_that_transformers_cannot_run_names_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny("llama3_2").save(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"^model\.build\.attn_implementation=flash.*; set sdpa$"):
        load_pretrained(str(tmp_path), attn_implementation="flash_attention_2")


def test_a_family_whose_prompts_attend_both_ways_is_refused(tmp_path: Path) -> None:
    tokenizer = FAMILIES["gemma3_vl"].tokenizer()
    text = {
        "model_type": "gemma", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": len(tokenizer),
    }  # fmt: skip
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 32, "patch_size": 16, "vision_use_head": False,
    }  # fmt: skip
    config = PaliGemmaConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.image_token_id,
        projection_dim=32,
    )
    PaliGemmaForConditionalGeneration(config).save_pretrained(tmp_path)
    images = SiglipImageProcessor(size={"height": 32, "width": 32})
    images.image_seq_length = 4
    template = tokenizer.chat_template
    PaliGemmaProcessor(images, tokenizer, chat_template=template).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"in paligemma .* of its images .* attend .* both ways"):
        load_pretrained(str(tmp_path))
