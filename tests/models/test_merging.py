"""Adapters of every kind that peft makes: what is pushed and exported is what the policy computes, or it is refused."""

from __future__ import annotations

import copy
import logging

import peft
import pytest
import torch
from safetensors.torch import save_file
from support.models.family_models import TEXT, tiny
from support.runs.composing import composed
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from ragen_pl.assembly import build
from ragen_pl.models.adapters import add_lora, base_is_changed, merge_adapters, unservable_adapters
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.checkpoint_weights import checkpoint_weights
from ragen_pl.models.merging import _log_rounding, check_merging
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.modules.reference import AdaptersOff, InitialPolicy, WithoutAdapters

# peft advises on many kinds
pytestmark = pytest.mark.filterwarnings("ignore")
IDS = torch.arange(5, 29).view(2, 12)


def experts():
    """Return a mixture whose experts are one tensor in each layer."""
    torch.manual_seed(0)
    sizes = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**TEXT, vocab_size=96, head_dim=8, **sizes)).eval()


def dense():
    return tiny("qwen3").model


def with_biases():
    return tiny("qwen2_5").model


def other_experts():
    return tiny("gemma4_vl_experts").model


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def train(model) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.2 * torch.randn(weight.shape, generator=generator)


def loaded(pairs, model, folder):
    """Return the model that an engine has which loads weights by their names and ignores others."""
    save_file(
        {name: weight.clone() for name, weight in pairs},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    model.config.save_pretrained(folder)
    return type(model).from_pretrained(folder)


def check_handed_over(model, folder) -> None:
    train(model)
    before = logits(model)
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    pushed = loaded(checkpoint_weights(model), model, folder)
    assert all(torch.equal(weight, state[name]) for name, weight in model.state_dict().items())
    torch.testing.assert_close(logits(pushed), before, atol=2e-4, rtol=1e-4)
    merge_adapters(model)
    model.save_pretrained(folder / "exported")
    exported = type(model).from_pretrained(folder / "exported")
    assert all(map(torch.equal, exported.state_dict().values(), pushed.state_dict().values()))
    assert exported.state_dict().keys() == pushed.state_dict().keys()


BOTH = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (experts, {}),
        (experts, {"use_rslora": True}),
        (experts, {"target_modules": [], "target_parameters": BOTH}),
        (experts, {"target_modules": [], "target_parameters": BOTH[1:]}),
        (experts, {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}),
        (experts, {"target_modules": ["down_proj"]}),
        (other_experts, {"target_modules": [], "target_parameters": BOTH}),
        (dense, {"use_dora": True}),
        (dense, {"init_lora_weights": "pissa"}),
        (dense, {"init_lora_weights": "olora"}),
        (dense, {"init_lora_weights": "eva"}),
        (dense, {"init_lora_weights": "mica"}),
        (dense, {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"k_proj": 2}}),
        (dense, {"velora_config": {}}),
        (dense, {"kasa_config": {}}),
        (with_biases, {"lora_bias": True, "target_modules": ["q_proj"]}),
    ],
)
def test_adapters_are_handed_over_as_they_compute(make, settings, tmp_path):
    model = make()
    add_lora(model, {"r": 4, "lora_alpha": 8, **settings})
    check_handed_over(model, tmp_path)


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (dense, {"modules_to_save": ["norm"]}, r"\.modules_to_save=\['norm'\]"),
        (dense, {"bias": "lora_only"}, r"\.bias=lora_only"),
        (dense, {"trainable_token_indices": [3]}, r"\.trainable_token_indices=\[3\]"),
        (dense, {"alora_invocation_tokens": [3]}, "alora_invocation_tokens.* can't be merged"),
        (dense, {"monteclora_config": {}}, "monteclora_config.* Linear on .* another kind"),
        (dense, {"lora_bias": True}, "lora_bias: True.* base layer has no bias"),
        (dense, {"layer_replication": [[0, 2], [1, 2]]}, "layer_replication.* which layers"),
        (dense, {"peft_type": "IA3"}, r"\.peft_type=IA3: adapters are LoRA's"),
        (dense, {"init_lora_weights": "corda"}, "init_lora_weights: corda.*preprocess_corda"),
        (dense, {"init_lora_weights": "pisa"}, "init_lora_weights: pisa.* Unknown init"),
        (dense, {"arrow_config": {}}, r"arrow_config.* can't make them \(AttributeError"),
        (dense, {"layers_to_transform": [0]}, "layers_to_transform: .* cannot be used"),
        (experts, {"use_dora": True}, "use_dora: True.* does not work with use_dora=True"),
        (experts, {"init_lora_weights": "pissa"}, r"pissa.* can't make them \(AttributeError"),
    ],
)
def test_other_adapters_are_refused_by_name(make, settings, message):
    with pytest.raises(ValueError, match=rf"^model\.build\.lora.*{message}") as raised:
        add_lora(make(), {"r": 2, **settings})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "config",
    [
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        peft.LoHaConfig(r=4, target_modules=["q_proj"]),
        peft.LoKrConfig(r=4, target_modules=["q_proj"]),
        peft.OFTConfig(r=2, oft_block_size=0, target_modules=["q_proj"]),
        peft.LNTuningConfig(target_modules=["input_layernorm"]),
        peft.TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=[6, 7]),
        peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["mlp"], bias="all"),
        peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[6, 7]),
    ],
    ids=lambda config: type(config).__name__,
)
def test_adapters_of_a_model_of_ones_own_are_handed_over_too(config, tmp_path):
    model = dense()
    model.add_adapter(config)
    check_merging(model)
    check_handed_over(model, tmp_path)


def test_adapters_of_ones_own_that_can_not_be_merged_are_refused():
    model = dense()
    model.add_adapter(peft.PolyConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"Linear on model\.layers\.0\.self_attn\.q_proj can't"):
        check_merging(model)


def test_a_trained_weight_that_no_checkpoint_has_is_refused():
    model = dense()

    class Hidden(nn.Module):
        """Keeps a weight out of the model's state."""

        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(1))

        def state_dict(self, *args, **kwargs):
            return kwargs["destination"]

    model.extra = Hidden()
    with pytest.raises(ValueError, match=r"extra\.shift is trained, but is no weight of a check"):
        check_merging(model)
    model.extra.shift.requires_grad_(False)
    check_merging(model)


def test_a_run_checks_the_model_that_it_builds(monkeypatch):
    bundle = tiny("qwen3")
    bundle.model.add_adapter(peft.PolyConfig(target_modules=["q_proj"]))
    monkeypatch.setattr(build, "build_bundle", lambda cfg: bundle)
    with pytest.raises(ValueError, match=r"^model\.build: Linear on .* can't be merged"):
        build.assemble(composed("env=bandit", "logger=none"))


def test_an_adapter_that_a_merge_leaves_out_is_found():
    """The check sees what a merge does, not what it says."""
    model = dense()
    add_lora(model, {"r": 2})
    layer = model.model.layers[0].self_attn.q_proj
    layer.register_parameter("extra", nn.Parameter(torch.ones(3)))
    with pytest.raises(
        ValueError, match=r"self_attn\.q_proj trains extra, which changes no merged"
    ):
        check_merging(model)
    model = dense()
    add_lora(model, {"r": 2})
    for part in model.modules():
        if hasattr(part, "lora_A"):
            part.get_delta_weight = lambda _, layer=part: layer.lora_B["default"].weight.sum()
            part.lora_A["default"].requires_grad_(False)
    with pytest.raises(ValueError, match="computes something else than the merged layer"):
        check_merging(model)


def test_merged_weights_are_rounded_once_and_a_line_says_so(caplog):
    model = dense().to(torch.bfloat16)
    base = {name: weight.float() for name, weight in model.state_dict().items()}
    add_lora(model, {"r": 4, "lora_alpha": 8})
    train(model)
    deltas = {
        name: layer.lora_B["default"].weight @ layer.lora_A["default"].weight * 2
        for name, layer in model.named_modules()
        if hasattr(layer, "lora_A")
    }
    _log_rounding.cache_clear()
    with caplog.at_level(logging.INFO), torch.no_grad():
        pushed = dict(checkpoint_weights(model))
        for name, delta in deltas.items():
            expected = (base[f"{name}.weight"] + delta).bfloat16()
            assert torch.equal(pushed[f"{name}.weight"], expected)
    (line,) = caplog.messages
    assert "merged in float32" in line and "rounded to bfloat16" in line and "=adapters" in line


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (dense, {"use_dora": True}),
        (dense, {"init_lora_weights": "olora"}),
        (experts, {"target_modules": ["q_proj"], "target_parameters": BOTH}),
        (with_biases, {"lora_bias": True, "target_modules": ["q_proj"]}),
    ],
)
def test_all_kinds_of_adapters_are_merged_in_float32(make, settings, dtype):
    model = make().to(dtype)
    add_lora(model, {"r": 4, "lora_alpha": 8, **settings})
    train(model)
    exact = {
        name: weight.to(dtype)
        for name, weight in checkpoint_weights(copy.deepcopy(model).to(torch.float32))
    }
    pushed = dict(checkpoint_weights(model))
    assert pushed.keys() == exact.keys()
    assert all(torch.equal(weight, exact[name]) for name, weight in pushed.items())
    merge_adapters(model)
    exported = dict(checkpoint_weights(model))
    assert all(torch.equal(weight, exact[name]) for name, weight in exported.items())


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_base_that_adapters_have_changed_is_no_reference_and_no_base_of_a_server(init):
    bundle = tiny("qwen3")
    loaded = logits(bundle.model)
    add_lora(bundle.model, {"r": 4, "lora_alpha": 4, "init_lora_weights": init})
    assert base_is_changed(bundle.model)
    policy = PolicyModule(bundle)
    with pytest.raises(ValueError, match=r"AdaptersOff: .*changed the weights.*FrozenCopy") as one:
        AdaptersOff().build(policy)
    assert "\n" not in str(one.value)
    assert "changed the weights under them" in (unservable_adapters(bundle.model) or "")
    reference = InitialPolicy().build(policy)
    train(bundle.model)
    torch.testing.assert_close(logits(reference.bundle.model), loaded, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("init", [True, "gaussian", "orthogonal"])
def test_other_initial_values_leave_the_base(init):
    bundle: ModelBundle = tiny("qwen3")
    add_lora(bundle.model, {"r": 4, "init_lora_weights": init})
    assert not base_is_changed(bundle.model)
    assert isinstance(AdaptersOff().build(PolicyModule(bundle)), WithoutAdapters)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "other adapters than two matrices"),
        ({"rank_pattern": {"q_proj": 3}}, "a rank or scale of its own"),
        ({"alpha_pattern": {"q_proj": 3}}, "a rank or scale of its own"),
        ({"use_rslora": True}, None),
        ({}, None),
    ],
)
def test_servers_get_adapters_alone_that_they_compute_as_peft_does(settings, message):
    model = dense()
    add_lora(model, {"r": 4, **settings})
    problem = unservable_adapters(model)
    assert problem is None if message is None else message in problem
