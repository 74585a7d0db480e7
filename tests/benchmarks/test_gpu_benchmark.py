"""The benchmark of real sizes on a GPU, with a small size on the CPU."""

import importlib
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
gpu = importlib.import_module("gpu")
sys.path.pop(0)

LAYERS = "num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2"
DECODER = f"vocab_size: 1000, hidden_size: 64, intermediate_size: 128, {LAYERS}"
ROPE = "rope_parameters: {rope_type: default, rope_theta: 10000.0, mrope_section: [2, 3, 3]}"
EYES = "depth: 2, hidden_size: 32, intermediate_size: 64, num_heads: 2, fullatt_block_indexes: [1]"
SIZES = {
    "text": f"{{{DECODER}}}",
    "images": f"{{text_config: {{{DECODER}, {ROPE}}}, vision_config: {{{EYES}, out_hidden_size: 64}}}}",
}
FEW = ("rollout.groups=2", "rollout.group_size=2", "rollout.max_response_tokens=8")


def overrides(case: str) -> list[str]:
    return [
        "model.size=small",
        f"+model.sizes.small={SIZES[case]}",
        "trainer.accelerator=cpu",
        *FEW,
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", gpu.CASES)
def test_all_figures_of_a_case_are_printed(case, capsys, monkeypatch):
    dialogue = ["--num-envs", "2", "--turns", "2", "--response-tokens", "4"]
    few = ["--iterations", "1", "--peak-tflops", "1"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--cases", case, *few, *dialogue, *overrides(case)])
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    gpu.main()
    printed = capsys.readouterr().out
    for pattern in (
        r"rollout +[\d,]+ sampled tokens/s",
        r"update +[\d,]+ tokens/s in .* MFU [\d.]+% of 1 TFLOP/s",
        r"rollout: not measured on a CPU, planned 0.\d\d GB",
        r"update: not measured on a CPU, planned 0.\d\d GB",
        r"engine [\d,]+ tokens/s, generate [\d,]+, ratio [\d.]+",
    ):
        assert re.search(pattern, printed), pattern


def test_operations_of_a_position_are_those_of_its_matrix_products():
    cfg = gpu.composed([*gpu.CASES["text"], *overrides("text")])
    agent = gpu.abstract_agent(cfg)
    workload = gpu.workload_of(cfg, agent.policy.bundle)
    head = agent.policy.model.get_output_embeddings().weight.numel()
    layers = sum(weight.numel() for weight in agent.policy.parameters()) - head
    # two operations a weight in the forward pass and four in the backward pass; no mask is taken into account
    attention = 2 * 12 * workload.length * 64
    sampled = workload.sampled / workload.length
    expected = 6 * layers + attention + sampled * 6 * head
    assert gpu.flops_of_a_position(cfg) == pytest.approx(expected, rel=0.15)
