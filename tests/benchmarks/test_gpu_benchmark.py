"""The benchmark of real sizes on a GPU, with a small size on the CPU."""

import importlib
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
gpu = importlib.import_module("gpu")
sys.path.pop(0)

LAYERS = "num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2"
DECODER = f"vocab_size: 1000, hidden_size: 64, intermediate_size: 128, {LAYERS}"
ROPE = "rope_parameters: {rope_type: default, rope_theta: 10000.0, mrope_section: [2, 3, 3]}"
EYES = "depth: 2, hidden_size: 32, intermediate_size: 64, num_heads: 2, fullatt_block_indexes: [1]"
TEXT = f"{{{DECODER}}}"
IMAGES = f"{{text_config: {{{DECODER}, {ROPE}}}, vision_config: {{{EYES}, out_hidden_size: 64}}}}"
PEAK_TFLOPS = 1.0
# four more tokens can be too few to time beside other work
TIMED = r"(?:\d+\.\d|nan)"


def bench(folder, size):
    # bfloat16 is slow on many processors
    small = ("model.size=small", f"+model.sizes.small={size}", "model.build.dtype=float32")
    few = ("rollout.groups=1", "rollout.group_size=2", "update.minibatches=1", "env.max_turns=2")
    overrides = (*small, *few, "rollout.max_response_tokens=4", "trainer.accelerator=cpu")
    return gpu.Bench(overrides, folder, "cpu", PEAK_TFLOPS, rows=2, prompt=40, tokens=4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("step", "size", "patterns"),
    [
        (
            "sampling",
            IMAGES,
            [rf"engine {TIMED} ms a token", rf"generate {TIMED} ms a token, ratio {TIMED}"],
        ),
        ("update_images", IMAGES, [r"7 images: [\d,]+ tokens/s .* MFU [\d.]+% of 1 TFLOP/s"]),
        ("update_text", TEXT, [r" 0 images: [\d,]+ tokens/s .* first [\d.]+ s"]),
        ("update_lora", TEXT, [r" 0 images: [\d,]+ tokens/s .* peak not measured"]),
        (
            "head",
            TEXT,
            [r"ours, with entropies: 64 tokens x 300: \d+ ms, .* log-probs [\d.]+e-0[34]"],
        ),
        (
            "gpu_80gb",
            IMAGES,
            [
                r"rollout [\d.]+ s, peak not measured on a CPU, planned 0.\d GB",
                r"optimizer step [\d.]+ s, peak not measured on a CPU, planned 0.\d GB",
                r"[\d.]+ s from the last iteration to the last validation .* [1-9]\d* s in all",
            ],
        ),
    ],
)
def test_all_figures_of_a_step_are_printed(step, size, patterns, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    for name, (overrides, shape, aim) in gpu.UPDATES.items():
        fewer = replace(shape, length=300, sampled=20)
        monkeypatch.setitem(gpu.UPDATES, name, (overrides, fewer, aim))
    monkeypatch.setattr(gpu, "HEAD", (64, 300, 32))
    monkeypatch.syspath_prepend(str(Path(gpu.__file__).parent))
    gpu.STEPS[step](bench(tmp_path, size))
    printed = capsys.readouterr().out
    for pattern in patterns:
        assert re.search(pattern, printed), pattern


def test_operations_of_a_position_are_those_of_its_matrix_products(tmp_path):
    overrides, shape, _ = gpu.UPDATES["update_text"]
    cfg = bench(tmp_path, TEXT).config(*overrides)
    agent = gpu.abstract_agent(cfg)
    head = agent.policy.model.get_output_embeddings().weight.numel()
    layers = sum(weight.numel() for weight in agent.policy.parameters()) - head
    # two operations a weight in the forward pass and four in the backward pass; no mask is taken into account
    attention = 2 * 12 * shape.length * 64
    sampled = shape.sampled / shape.length
    expected = 6 * layers + attention + sampled * 6 * head
    assert gpu.flops_of_a_position(cfg, shape) == pytest.approx(expected, rel=0.15)
