"""Tiny models with heads of 32, which vLLM needs on a CPU; engines of them, played and compared with the trainer."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import torch
from support.episodes.trajectories import make_request, responses, roll_out, starts
from support.models.families import FAMILIES
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

import envs  # noqa: F401 - registers the environments
import visual_envs  # noqa: F401
from ragen_pl.data.collate import collate
from ragen_pl.engines.protocol import GenerationRequest, Prompt, collective_rollout, generate
from ragen_pl.engines.vllm.engine import VLLMEngine
from ragen_pl.environments.manager import EnvironmentManager
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.truncation import Truncation
from ragen_pl.modules.policy import PolicyModule, TokenReadout
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
}
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
    "fullatt_block_indexes": [1],
    "window_size": 56,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
MARKS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
KINDS = ("text", "images")
TRUNCATIONS = (
    Truncation(top_p=0.7),
    Truncation(top_k=4),
    Truncation(min_p=0.2),
    Truncation(top_p=0.9, top_k=20, min_p=0.02),
)
ENVIRONMENTS = {False: "ragen/FrozenLake-v0", True: "ragen/FrozenLakeVisual-v0"}


def vocabulary(tokenizer: PreTrainedTokenizerFast) -> dict[str, int | None]:
    return {
        # rows without a token
        "vocab_size": len(tokenizer) + 3,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def with_lively_weights(model: PreTrainedModel, *, seed: int = 0) -> PreTrainedModel:
    """Draw weights so large that a token of context changes a distribution."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                weight.copy_(noise * 2.0 * weight.shape[-1] ** -0.5)
            else:
                weight.add_(noise * 0.1)
    return model.eval()


def build(kind: str) -> ModelBundle:
    """Return a tiny Qwen2, also with tied embeddings, or Qwen2.5-VL; a tenth of its tokens end a response."""
    family = FAMILIES["qwen2_5_vl" if kind == "images" else "qwen2_5"]
    tokenizer = family.tokenizer()
    processor = None
    if kind != "images":
        model = Qwen2ForCausalLM(
            Qwen2Config(**TEXT, **vocabulary(tokenizer), tie_word_embeddings=kind == "tied")
        )
    else:
        marks = {key: tokenizer.convert_tokens_to_ids(token) for key, token in MARKS.items()}
        config = Qwen2_5_VLConfig(
            text_config=TEXT | {"rope_parameters": MROPE} | vocabulary(tokenizer),
            vision_config=VISION,
            **marks,
        )
        model = Qwen2_5_VLForConditionalGeneration(config)
        processor = Qwen2_5_VLProcessor(
            Qwen2VLImageProcessor(size={"shortest_edge": 28 * 28, "longest_edge": 84 * 84}),
            tokenizer,
            video_processor=Qwen2VLVideoProcessor(),
            chat_template=tokenizer.chat_template,
        )
    ends = [*family.eos_token_ids(tokenizer), *range(20, 40)]
    model.generation_config = GenerationConfig(eos_token_id=ends)
    return ModelBundle(with_lively_weights(model), tokenizer, processor)


def start(bundle: ModelBundle, **settings) -> VLLMEngine:
    engine = VLLMEngine(PolicyModule(bundle), max_tokens=2048, cache_bytes=2**26, **settings)
    engine.load_weights(0)
    return engine


def play(
    engine,
    *,
    window="all",
    temperature=1.0,
    greedy=False,
    groups=3,
    first=0,
    turns=3,
    num_envs=64,
    truncation=None,
):
    bundle = engine.bundle
    proxy = AgentProxy(
        environments=EnvironmentManager(
            target=ENVIRONMENTS[bundle.images is not None], max_turns=turns, invalid_ends=False
        ),
        context=ContextManager(bundle, window=window, system_prompt=None, max_tokens=2048),
        max_response_tokens=12,
        temperature=temperature,
        num_envs=num_envs,
        **({} if truncation is None else asdict(truncation)),
    )
    specs = starts(groups, 2, first=first)
    return roll_out(proxy, engine, specs, seed_key=(0, "test"), greedy=greedy)


def gap(bundle, trajectories, *, truncation=None) -> float:
    """Return the largest difference of the engine's log-probs from the trainer's."""
    batch = collate(trajectories, bundle)
    readout = TokenReadout(truncation=truncation)
    with torch.no_grad():
        scores = PolicyModule(bundle)(batch.samples, batch.images, readout=readout)
    difference = (scores.logprobs - batch.samples.rollout_logprobs)[batch.samples.turn >= 0]
    assert len(difference) > 50
    return float(difference.abs().max())


def request(bundle, text, **settings) -> GenerationRequest:
    ids = np.array(bundle.tokenizer.encode(text))
    return make_request(Prompt(ids=ids, unexpanded_ids=ids), **settings)


def change_weights(bundle: ModelBundle, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in bundle.model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(0.3 * noise * weight.std())


def check_new_weights(engine) -> None:
    """Check that new weights are sampled from, without keys of older ones; the weights are as before afterwards."""
    bundle = engine.bundle
    before = {name: weight.clone() for name, weight in bundle.model.state_dict().items()}
    first = play(engine, greedy=True)
    change_weights(bundle, seed=1)
    engine.load_weights(5)
    trajectories = play(engine)
    assert gap(bundle, trajectories) < 1e-4
    with collective_rollout(engine):
        assert generate(engine, [request(bundle, "Go.")], keep=False)[0].version == 5
    bundle.model.load_state_dict(before)
    assert gap(bundle, trajectories) > 0.1
    engine.load_weights(6)
    assert responses(play(engine, greedy=True)) == responses(first)
