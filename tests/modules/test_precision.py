"""Effects of the precision of a run: compute, old log-probs and the optimizer."""

from __future__ import annotations

import logging

import lightning.pytorch as pl
import pytest
import torch

from ragen_pl.algorithms.mismatch import MaskedWeights, TruncatedWeights
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.modules.losses import ReferenceKL, UpdateLoss


def agent_in(make, precision: str, *, dtype: torch.dtype = torch.float32, **changes):
    agent = make.agent(**changes)
    agent.policy.to(dtype)
    agent.trainer = pl.Trainer(
        accelerator="cpu", barebones=True, max_epochs=10, precision=precision
    )
    return agent


@pytest.mark.parametrize("own_critic", [False, True], ids=["shared", "own"])
def test_engine_scorer_reference_and_critic_compute_alike(make, own_critic):
    agent = agent_in(
        make, "bf16-mixed", own_critic=own_critic, loss=UpdateLoss(kl=ReferenceKL(coefficient=0.1))
    )
    models = {"policy": agent.policy.model, "reference": agent.reference.model}
    if own_critic:
        models["critic"] = agent.critic.model
    computed: dict[str, set[torch.dtype]] = {name: set() for name in models}
    for name, model in models.items():
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_hook(
                    lambda _layer, _inputs, output, name=name: computed[name].add(output.dtype)
                )
    trajectories = make.play(agent)
    assert computed["policy"] == {torch.bfloat16}
    batch = make.batch(agent, window="all")
    with agent.trainer.precision_plugin.train_step_context():
        agent.training_step(make.minibatch(batch), 0).backward()
    assert all(dtypes == {torch.bfloat16} for dtypes in computed.values())
    # what is summed, compared and trained is in float32
    assert trajectories[0].turns[0].response_logprobs.dtype == "float32"
    samples = batch.samples
    logprobs = samples.rollout_logprobs, samples.old_logprobs
    for tensor in (samples.values, samples.advantages, *logprobs, batch.reference):
        assert tensor.dtype is torch.float32
    assert {weight.grad.dtype for weight in agent.policy.parameters()} == {torch.float32}


def test_values_are_not_rounded_to_the_compute_dtype(make):
    agent = agent_in(make, "bf16-mixed")
    last = agent.critic.head.layers[-1]
    torch.nn.init.zeros_(last.weight)
    torch.nn.init.constant_(last.bias, 1000.3)
    samples = make.batch(agent).samples
    assert samples.values[samples.sampled].sub(1000.3).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("precision", "dtype", "mismatch", "expected"),
    [
        ("32-true", torch.float32, "auto", type(None)),
        ("bf16-mixed", torch.float32, "auto", TruncatedWeights),
        ("32-true", torch.bfloat16, "auto", TruncatedWeights),
        ("bf16-mixed", torch.float32, None, type(None)),
        ("32-true", torch.float32, MaskedWeights(), MaskedWeights),
    ],
)
def test_old_logprobs_are_the_trainers_unless_compute_is_float32(
    make, precision, dtype, mismatch, expected
):
    agent = agent_in(make, precision, dtype=dtype, loss=UpdateLoss(mismatch=mismatch))
    assert type(agent.correction) is expected
    trajectories = make.play(agent)
    batch = make.batch(agent)
    engine = sorted(
        float(logprob)
        for trajectory in trajectories
        for turn in trajectory.turns
        for logprob in turn.response_logprobs
    )
    samples = batch.samples
    old = sorted(samples.old_logprobs[samples.sampled].tolist())
    rollout = sorted(samples.rollout_logprobs[samples.sampled].tolist())
    assert rollout == pytest.approx(engine, abs=1e-7)
    assert (old == pytest.approx(engine, abs=1e-7)) is (expected is type(None))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_run_says_what_its_precision_changes(make, precision, caplog, monkeypatch):
    dtype = torch.bfloat16 if precision == "32-true" else torch.float32
    agent = agent_in(make, precision, dtype=dtype)
    optimizer = agent.configure_optimizers()["optimizer"]
    monkeypatch.setattr(agent, "optimizers", lambda use_pl_optimizer=True: optimizer)
    with caplog.at_level(logging.INFO, logger="ragen_pl"):
        agent.on_fit_start()
    assert ("float32 copies of the weights" in caplog.text) is (dtype is torch.bfloat16)
    assert "algorithm.loss.mismatch=null takes the engine's" in caplog.text


def test_an_engine_that_is_not_exact_is_corrected_for_in_float32(make, caplog):
    class Rounding(TransformersEngine):
        exact = False

    agent = agent_in(make, "32-true", engine=Rounding)
    with caplog.at_level(logging.INFO, logger="ragen_pl"):
        agent.rollout_engine()
        agent.rollout_engine()
    assert type(agent.correction) is TruncatedWeights
    (message,) = [message for message in caplog.messages if message.startswith("policy loss")]
    assert "since the rollout engine rounds otherwise" in message
    agent = agent_in(make, "32-true", engine=Rounding, loss=UpdateLoss(mismatch=None))
    agent.rollout_engine()
    assert agent.correction is None
