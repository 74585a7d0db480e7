"""The sizes of named models in `conf/model/` give models with the published number of parameters."""

from __future__ import annotations

import pytest
import torch
from omegaconf import OmegaConf
from support.runs.composing import composed
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from ragen_pl.config import ConfigError, check_config, config_dir
from ragen_pl.memory.named import named_config

# Total of the hub's safetensors files, and what they hold that the model class does not.
PUBLISHED = {
    ("qwen2_5", "0.5B"): (494_032_768, 0),
    ("qwen2_5", "1.5B"): (1_543_714_304, 0),
    ("qwen2_5", "3B"): (3_085_938_688, 0),
    ("qwen2_5", "7B"): (7_615_616_512, 0),
    # the files of 0.6B and 1.7B hold the shared head twice
    ("qwen3", "0.6B"): (751_632_384, 151_936 * 1024),
    ("qwen3", "1.7B"): (2_031_739_904, 151_936 * 2048),
    ("qwen3", "4B"): (4_022_468_096, 0),
    ("qwen3", "8B"): (8_190_735_360, 0),
    # a layer that predicts a second token
    ("qwen3_5", "0.8B"): (873_438_784, 20_452_864),
    ("qwen3_5", "2B"): (2_274_069_824, 60_828_160),
    ("qwen3_5", "4B"): (4_659_865_088, 120_599_552),
    ("qwen3_5", "9B"): (9_653_104_368, 243_290_624),
    ("llama3_2", "1B"): (1_235_814_400, 0),
    ("llama3_2", "3B"): (3_212_749_824, 0),
    ("smollm2", "135M"): (134_515_008, 0),
    ("smollm2", "360M"): (361_821_120, 0),
    ("smollm2", "1.7B"): (1_711_376_384, 0),
    ("gemma3", "270m"): (268_098_176, 0),
    ("gemma3", "1b"): (999_885_952, 0),
    ("gemma3_vl", "4b"): (4_300_079_472, 0),
    ("gemma3_vl", "12b"): (12_187_325_040, 0),
    # keys and values of the layers that use those of others, with their norms, and a number for each layer
    ("gemma4", "E2B"): (5_123_178_051, (16 * 256 + 4 * 512) * (2 * 1536 + 1) + 35),
    ("gemma4", "E4B"): (7_996_156_490, 2 * 2560 * (15 * 512 + 3 * 1024) + 15 * 256 + 3 * 512 + 42),
    ("qwen2_5_vl", "3B"): (3_754_622_976, 0),
    ("qwen2_5_vl", "7B"): (8_292_166_656, 0),
    ("qwen3_vl", "2B"): (2_127_532_032, 0),
    ("qwen3_vl", "4B"): (4_437_815_808, 0),
    ("qwen3_vl", "8B"): (8_767_123_696, 0),
    ("smolvlm", "256M"): (256_484_928, 0),
    ("smolvlm", "500M"): (507_482_304, 0),
    ("llava_onevision", "0.5b"): (893_618_208, 0),
    ("llava_onevision", "7b"): (8_030_348_832, 0),
    ("internvl3", "1B"): (938_193_024, 0),
    ("internvl3", "2B"): (2_088_957_440, 0),
    ("internvl3", "8B"): (7_944_373_760, 0),
    ("lfm2_vl", "450M"): (450_822_656, 0),
    ("lfm2_vl", "1.6B"): (1_584_804_000, 0),
}
FAST = [("qwen2_5", "0.5B"), ("smolvlm", "256M"), ("gemma4", "E2B")]


@pytest.mark.parametrize(
    ("name", "size"),
    [pytest.param(*key, marks=[] if key in FAST else pytest.mark.slow) for key in PUBLISHED],
)
def test_named_size_has_the_published_parameters(name, size):
    cfg = composed(f"model={name}", f"model.size={size}")
    check_config(cfg)
    config = named_config(OmegaConf.to_container(cfg.model, resolve=True))
    sees = type(config) in AutoModelForImageTextToText._model_mapping
    with torch.device("meta"):
        model = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_config(config)
    published, more = PUBLISHED[name, size]
    assert sum(weight.numel() for weight in model.parameters()) == published - more
    assert size in cfg.model.build.path


def test_every_size_is_in_the_table():
    found = set()
    for file in (config_dir() / "model").glob("*.yaml"):
        sizes = OmegaConf.load(file).get("sizes") or {}
        found |= {(file.stem, str(size)) for size in sizes}
        if sizes:
            assert OmegaConf.load(file).size in sizes
    assert found == set(PUBLISHED)


def test_unknown_size_is_refused_with_those_that_exist():
    with pytest.raises(ConfigError, match=r"model\.size=2B: expected one of 0\.5B, 1\.5B, 3B, 7B"):
        check_config(composed("model=qwen2_5", "model.size=2B"))
