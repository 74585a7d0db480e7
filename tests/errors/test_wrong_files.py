"""Damaged or unsuitable checkpoints and models."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

# the run is a copy
pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")


@pytest.fixture
def go_on(fit, tiny, run):
    """Return a function that continues the run with changes and returns the refusal."""

    def call(*changes: str, ckpt_path: str = "last") -> str:
        refused: str = fit(*tiny, "paths.run_dir=run", f"ckpt_path={ckpt_path}", *changes).refused()
        return refused

    return call


def test_a_checkpoint_that_does_not_fit_is_refused(go_on, run):
    last = run / "checkpoints" / "last.ckpt"
    wider = go_on("trainer.max_epochs=2", "model.build.text.intermediate_size=32")
    assert "warm_start.pt: holds another model or algorithm: policy.model." in wider
    assert "is [32, 64], expected [32, 32]; give the overrides that the run had" in wider
    other = go_on("trainer.max_epochs=2", "algorithm.critic=own")
    assert "warm_start.pt: holds another model or algorithm: critic.model." in other
    assert "is missing, expected [" in other and "give the overrides that the run had" in other
    (run / "warm_start.pt").unlink()
    other = go_on("warm_start=none", "algorithm=grpo", "rollout.group_size=2", "rollout.groups=2")
    assert f"ckpt_path={last}: holds another model or algorithm: critic." in other

    state = torch.load(last, weights_only=False)
    torch.save({"state_dict": state["state_dict"]}, run / "weights.ckpt")
    assert "holds no agent" in go_on("warm_start=none", ckpt_path="run/weights.ckpt")

    torch.save({"layer": torch.zeros(2)}, run / "foreign.pt")
    assert "holds no agent" in go_on("warm_start=none", ckpt_path="run/foreign.pt")


def test_a_run_that_would_end_before_its_checkpoint_is_refused(go_on, run):
    last = run / "checkpoints" / "last.ckpt"
    torch.save(torch.load(last, weights_only=False) | {"epoch": 5}, last)
    refused = go_on("trainer.max_epochs=3")
    assert refused.startswith(f"trainer.max_epochs=3: {last} is of iteration 6; set 6 or more")


def test_initial_weights_that_do_not_fit_are_refused(fit, tiny, run, tmp_path):
    def begin(file: str, *changes: str) -> str:
        message = fit(
            *tiny, f"warm_start.weights={file}", "paths.run_dir=other", *changes
        ).refused()
        assert not (tmp_path / "other" / "warm_start.pt").exists()
        return message

    given = "run/warm_start.pt"
    wider = begin(given, "model.build.text.intermediate_size=32")
    assert wider.startswith(
        f"warm_start.weights={given}: holds another model or algorithm: policy."
    )
    assert wider.endswith("give the file of a run with the same model and algorithm")
    own = begin(given, "algorithm.critic=own")
    assert "critic.model." in own and "is missing, expected [" in own
    torch.save({"layer": torch.zeros(2)}, tmp_path / "foreign.pt")
    foreign = begin("foreign.pt")
    assert "policy.model." in foreign and "is missing" in foreign
    torch.save(torch.zeros(2), tmp_path / "tensor.pt")
    assert "warm_start.weights=tensor.pt: " in begin("tensor.pt")
    (tmp_path / "half.pt").write_bytes((run / "warm_start.pt").read_bytes()[:1000])
    half = begin("half.pt")
    assert half.startswith("warm_start.weights=half.pt: ") and "damaged or no checkpoint" in half
    assert "is damaged or no checkpoint" in begin("run")  # a folder
    assert "warm_start.weights=gone.pt: expected a path that exists" in begin("gone.pt")


def test_opponents_of_another_model_are_refused_before_the_warm_start(fit, tiny, run, tmp_path):
    files = "opponents.files=[run/checkpoints/last.ckpt]"
    refused = fit(
        *tiny,
        "env=kuhn_poker",
        "opponents=frozen",
        files,
        "paths.run_dir=other",
        "model.build.text.intermediate_size=32",
    ).refused()
    assert refused.startswith("opponents.files=run/checkpoints/last.ckpt: holds another model")
    assert not (tmp_path / "other" / "warm_start.pt").exists()


def test_a_damaged_checkpoint_is_refused(fit, tiny, go_on, command, run):
    last, best = (run / "checkpoints" / f"{name}.ckpt" for name in ("last", "best"))
    whole, other = last.read_bytes(), best.read_bytes()
    best.unlink()
    last.write_bytes(b"not a checkpoint")
    assert "is damaged or no checkpoint; give another one" in go_on()
    last.write_bytes(whole[: len(whole) // 2])  # cut off: the end of a zip file says what it holds
    assert "is damaged or no checkpoint; give another one" in go_on()
    last.write_bytes(b"")
    assert "is damaged or no checkpoint" in go_on()
    last.write_bytes(whole)
    warm_start = run / "warm_start.pt"
    initial = warm_start.read_bytes()
    warm_start.write_bytes(b"half")
    assert "warm_start.pt is damaged" in go_on()

    # a file that is named is not replaced by a whole one, the word `last` is
    warm_start.write_bytes(initial)
    best.write_bytes(other)
    last.write_bytes(b"")
    named = f"{last} is damaged or no checkpoint; give another one"
    assert f"ckpt_path={last}: {named}" in go_on(ckpt_path=str(last))
    evaluate = ("mlflow=false", "validation.episodes=2", "device=cpu", "to=out")
    assert f"{last} is damaged" in command("evaluate", f"ckpt={last}", *evaluate).refused()
    goes_on = fit(*tiny, "paths.run_dir=run", "ckpt_path=last")
    assert goes_on.code == 0
    assert f"{last} is damaged or no checkpoint; the run continues from {best}" in goes_on.stdout
    assert torch.load(last)["global_step"] > 0  # written anew


@pytest.fixture
def model(tmp_path) -> Path:
    """A model's folder, as `save_pretrained` writes it."""
    from ragen_pl.models.build import build_small_lm

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    build_small_lm(text=sizes).save(tmp_path / "model")
    return tmp_path / "model"


def load(fit, *changes: str):
    return fit(
        "env=frozenlake", "env.max_turns=2", "rollout.max_response_tokens=24",
        "model=pretrained", "model.build.path=model", "warm_start=none", *changes,
    )  # fmt: skip


def test_a_models_folder_that_cannot_be_read_is_refused(fit, model):
    (model / "config.json").write_text("{ not json")
    assert load(fit).refused().startswith("model.build.path=model: no model can be read there")
    shutil.rmtree(model)
    assert "no model can be read there" in load(fit).refused()
    model.mkdir()
    assert "no model can be read there" in load(fit).refused()


def test_adapters_that_cannot_be_added_are_refused(fit, model, monkeypatch):
    assert "model.build.lora.r=0: expected" in load(fit, "model.build.lora={r: 0}").refused()
    assert "model.build.lora=8: expected" in load(fit, "model.build.lora=8").refused()
    message = load(fit, "model.build.lora={rank: 8}").refused()
    assert message.startswith("model.build: ") and "'rank'" in message
    off = "algorithm.loss.kl.reference._target_=ragen_pl.modules.reference.AdaptersOff"
    assert "has no adapters to switch off; set model.build.lora" in load(fit, off).refused()
    monkeypatch.setattr("ragen_pl.models.settings.find_spec", lambda name: None)
    message = load(fit, "model.build.lora={r: 8}").refused()
    assert message.startswith(
        "model.build.lora: peft is not installed; pip install 'ragen_pl[lora]'"
    )


def test_damaged_weights_and_a_missing_tokenizer_are_refused(fit, model):
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert load(fit).refused().startswith("model.build: ")
    weights.write_bytes(whole[:200])
    assert (
        "vocab_size=512 and hidden_size=32, and the files of its weights have 200 bytes"
        in load(fit).refused()
    )
    weights.write_bytes(whole)
    for file in model.glob("tokenizer*"):
        file.unlink()
    assert load(fit).refused().startswith("model.build: ")


KEEPS_NOT = """{%- for m in messages -%}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|end|>
{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""


def test_a_chat_template_that_is_missing_or_broken_is_refused(fit, model):
    template = model / "chat_template.jinja"
    template.write_text("{{ raise_exception('no system prompt here') }}")
    assert "no system prompt here" in load(fit).refused()
    template.unlink()
    assert "no chat template; set tokenizer.chat_template" in load(fit).refused()


def test_a_chat_template_that_rewrites_its_history_is_reported_once(fit, model):
    (model / "chat_template.jinja").write_text(KEEPS_NOT)
    message = "chat template: it strips the thoughts of earlier responses; each turn is a sample of its own"
    result = load(fit, "context.window=all", "validation.baselines=null")
    assert result.code == 0 and result.stdout.count(message) == 1
    kept = load(
        fit, "context.window=all", "context.keep_thoughts=true", "validation.baselines=null"
    )
    assert kept.code == 0 and "so an episode is one sample" in kept.stdout
    assert "chat template:" not in load(fit, "context.window=1", "validation.baselines=null").stdout


def test_an_argument_that_the_chat_template_does_not_read_is_refused(fit, model):
    message = load(fit, "+context.template_kwargs.enable_thinking=false").refused()
    assert message == (
        "context.template_kwargs.enable_thinking: the model's chat template reads none"
    )
    wrong = load(fit, "+context.template_kwargs.date=[1]").refused()
    assert wrong.startswith("context.template_kwargs.date=[1]: expected true or false or")
