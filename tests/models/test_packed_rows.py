"""Rows one after the other give the log-probs and gradients of padded rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models.compared_logprobs import play, trajectory_of
from support.models.family_models import MODELS, tiny

from ragen_pl.data.collate import collate
from ragen_pl.data.settings import UpdateSettings
from ragen_pl.models import attention, packed_rows
from ragen_pl.modules.policy import PolicyModule

PACKED = [
    "qwen3", "llama3_2", "smollm2", "qwen2_5_vl", "qwen3_vl", "smolvlm", "llava_onevision", "internvl",
]  # fmt: skip
PADDED = [name for name in MODELS if name not in PACKED]


def scored(
    name: str, *, packed: bool | None, **update: Any
) -> tuple[PolicyModule, torch.Tensor, dict[str, torch.Tensor]]:
    bundle, single = tiny(name), MODELS[name].single_image
    episodes = play(bundle, window=1 if single else "all", keep=True, single_image=single)
    batch = collate([trajectory_of(episode, n) for n, episode in enumerate(episodes)], bundle)
    assert len(batch.samples.length.unique()) > 1
    settings = UpdateSettings(packed=packed, share_prefix=False, **update)
    policy = PolicyModule(bundle, update=settings).train()
    scores = policy(batch.samples, batch.images)
    (scores.logprobs.sum() + scores.entropy.sum()).backward()
    gradients = {
        name: weight.grad for name, weight in policy.named_parameters() if weight.grad is not None
    }
    return policy, scores.logprobs.detach(), gradients


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", PACKED)
def test_packed_rows_score_as_padded_rows(
    name: str, checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(*arguments: Any, is_causal: bool, **others: Any) -> Any:
        # not those of the image encoder
        if is_causal:
            calls.append(len(arguments[3]))
        return inner(*arguments, is_causal=is_causal, **others)

    _, expected, gradients = scored(name, packed=False, gradient_checkpointing=checkpointed)
    inner = attention._by_length
    monkeypatch.setattr(attention, "_by_length", counted)
    policy, logprobs, packed = scored(name, packed=True, gradient_checkpointing=checkpointed)
    layers = len(policy.bundle.layers)
    # a pass finds out whether rows are kept apart
    assert len(calls) == layers * (3 if checkpointed else 2)
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    assert packed.keys() == gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for weight, gradient in gradients.items():
        assert float((packed[weight] - gradient).abs().max()) < 1e-5 * largest, weight


@pytest.mark.parametrize("name", PADDED)
def test_other_families_stay_padded_and_refuse(name: str) -> None:
    with pytest.raises(ValueError, match=r"^update\.packed=true: .* set null or false"):
        PolicyModule(tiny(name), update=UpdateSettings(packed=True))
    bundle = tiny(name)
    bundle.packs_rows = None
    assert not packed_rows.packs(bundle, torch.device("cpu"))


def test_rows_that_mix_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a family's layers do not hand the bounds to attention."""

    def mixing(module: Any, query: Any, key: Any, value: Any, _: Any, **others: Any) -> Any:
        return attention.causal_attention(
            module, query, key, value, None, scaling=others["scaling"]
        )

    bundle = tiny("llama3_2")
    attention.pack_rows(bundle.model.config)
    monkeypatch.setitem(attention_functions(), attention.PACKED_ROWS, mixing)
    bundle.packs_rows = True
    with pytest.raises(ValueError, match=r"update\.packed=true: the layers of llama mix rows"):
        packed_rows.packs(bundle, torch.device("cpu"))


def attention_functions() -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS


def test_rows_stay_padded_on_a_cpu_by_default() -> None:
    bundle = tiny("llama3_2")
    assert not packed_rows.packs(bundle, torch.device("cpu"))
    assert bundle.model.config._attn_implementation == "sdpa"
