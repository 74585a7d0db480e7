"""The agent before and around its update: values, bootstraps, reference, optimizer, checkpoints."""

from __future__ import annotations

import functools

import pytest
import torch

from ragen_pl.algorithms.advantages.bilevel import BilevelGAE
from ragen_pl.algorithms.advantages.group import GroupRelative
from ragen_pl.data.collate import collate
from ragen_pl.data.settings import UpdateSettings
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.modules.agent import AgentModule
from ragen_pl.modules.critic import CriticModule
from ragen_pl.modules.losses import ReferenceKL, UpdateLoss
from ragen_pl.modules.masking import Masks
from ragen_pl.modules.policy import PolicyModule, TokenReadout
from ragen_pl.modules.settings import OptimizationSettings

KL = UpdateLoss(kl=ReferenceKL(coefficient=0.1))


@pytest.mark.parametrize("own_critic", [False, True], ids=["shared", "own"])
def test_value_and_logprob_of_a_token_are_read_one_position_earlier(make, own_critic):
    agent = make.agent(own_critic=own_critic)
    samples = make.batch(agent, window="all").samples
    trunk = agent.critic.backbone if own_critic else agent.policy.bundle
    for row in range(len(samples)):
        ids = samples.input_ids[row : row + 1, : samples.length[row]]
        with torch.no_grad():
            hidden = trunk.backbone(input_ids=ids, use_cache=False).last_hidden_state[0]
            values = agent.critic.head(hidden)
            logits = agent.policy.model(ids).logits[0].double()
        logits[:, list(agent.policy.bundle.banned_token_ids)] = -torch.inf
        logprobs = logits.log_softmax(-1)
        for t in (samples.turn[row] >= 0).nonzero().flatten().tolist():
            assert float(samples.values[row, t]) == pytest.approx(float(values[t - 1]), abs=1e-5)
            expected = float(logprobs[t - 1, samples.input_ids[row, t]])
            assert float(samples.old_logprobs[row, t]) == pytest.approx(expected, abs=1e-4)


def test_value_of_a_token_does_not_depend_on_the_token(make):
    agent = make.agent()
    samples = make.batch(agent).samples
    t = int((samples.turn[0] >= 0).nonzero()[2])

    def values():
        readout = TokenReadout(critic=agent.critic)
        with torch.no_grad():
            return agent.policy(samples, torch.zeros(0), readout=readout).values[0]

    before = values()
    samples.input_ids[0, t] = (samples.input_ids[0, t] + 1) % 200 + 20
    after = values()
    assert torch.allclose(before[: t + 1], after[: t + 1], atol=1e-6)
    assert abs(float(before[t + 1] - after[t + 1])) > 1e-4


def test_trainer_and_engine_log_probs_agree(make):
    for changes in ({}, {"images": True}):
        for window in (1, "all"):
            agent = make.agent(**changes, update=UpdateSettings(scoring="always"))
            make.batch(agent, window=window)
            metrics = agent.preparation.compute()
            assert metrics["logprob_mismatch_max"] < 1e-4
            assert abs(metrics["logprob_mismatch_kl"]) < 1e-6


@pytest.mark.parametrize("own_critic", [False, True], ids=["shared", "own"])
def test_only_truncated_episodes_are_bootstrapped(make, own_critic):
    agent = make.agent(
        own_critic=own_critic,
        estimator=BilevelGAE(gamma_turn=0.9, lam_turn=1.0),
        loss=UpdateLoss(whiten=False),
    )
    plain = make.play(agent, groups=2, members=1)
    both = [plain[0], make.cut(plain[1])]
    bundle = agent.policy.bundle
    ended, cut_one = agent.prepare(collate(plain, bundle)), agent.prepare(collate(both, bundle))
    assert ended.episodes.bootstrap.tolist() == [0.0, 0.0]
    assert not ended.episodes.truncated.any()

    ids = torch.from_numpy(both[1].final_prompt_ids)[None]
    trunk = agent.critic.backbone if own_critic else bundle
    with torch.no_grad():
        hidden = trunk.backbone(input_ids=ids, use_cache=False).last_hidden_state
        value = float(agent.critic.head(hidden[0, -1]))
    assert abs(value) > 1e-3
    assert cut_one.episodes.bootstrap.tolist() == [0.0, pytest.approx(value, abs=1e-5)]

    def last_return(batch, episode):
        rows = batch.samples.episode == episode
        tokens = batch.samples.token.masked_fill(~rows[:, None], -1)
        return float(batch.samples.returns.flatten()[tokens.flatten().argmax()])

    assert last_return(cut_one, 0) == last_return(ended, 0)
    gain = last_return(cut_one, 1) - last_return(ended, 1)
    assert gain == pytest.approx(0.9 * value, abs=1e-5)


def test_reference_is_a_frozen_copy(make):
    agent = make.agent(loss=KL)
    agent.train()
    assert agent.policy.training and not agent.reference.training
    assert not any(module.training for module in agent.reference.modules())
    assert not any(parameter.requires_grad for parameter in agent.reference.parameters())
    before = {name: value.clone() for name, value in agent.reference.state_dict().items()}
    optimizer = agent.configure_optimizers()["optimizer"]
    agent.training_step(make.minibatch(make.batch(agent)), 0).backward()
    optimizer.step()
    changed = agent.policy.state_dict()
    assert any(not torch.equal(value, changed[name]) for name, value in before.items())
    after = agent.reference.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_penalty_without_a_reference_is_none(make):
    loss = UpdateLoss(kl=ReferenceKL(coefficient=0.0, reference=None))
    assert make.agent(loss=loss).reference is None
    with pytest.raises(ValueError, match=r"kl\.coefficient=0\.1: there is nothing to diverge from"):
        ReferenceKL(coefficient=0.1, reference=None)
    with pytest.raises(
        ValueError, match=r"kl\.top_k=8: estimator=k3 reads the sampled tokens alone"
    ):
        ReferenceKL(coefficient=0.1, estimator="k3", top_k=8)


def test_penalty_can_be_switched_on_with_a_reference(make):
    agent = make.agent(loss=UpdateLoss(kl=ReferenceKL(coefficient=0.0)))
    reference = {name: value.clone() for name, value in agent.reference.state_dict().items()}
    batch = make.batch(agent)
    assert batch.reference is None  # it is not scored for nothing
    optimizer = agent.configure_optimizers()["optimizer"]
    agent.training_step(make.minibatch(batch), 0).backward()
    optimizer.step()
    assert agent.loss.adjust(kl_coefficient=0.5) == {"kl_coefficient": (0.0, 0.5)}
    minibatch = make.minibatch(make.batch(agent))
    with_penalty = agent.training_step(minibatch, 0)
    agent.loss.adjust(kl_coefficient=0.0)
    assert with_penalty > agent.training_step(minibatch, 0)
    after = agent.reference.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in reference.items())


def test_penalty_without_a_reference_is_rejected(make):
    agent = make.agent(loss=UpdateLoss(kl=None))
    assert agent.reference is None and agent.loss.adjust(kl_coefficient=0.0) == {}
    with pytest.raises(
        ValueError, match=r"kl_coefficient=0.5: .* set algorithm.loss.kl.coefficient=0.0"
    ):
        agent.loss.adjust(kl_coefficient=0.5)


def test_optimizer_has_a_group_for_policy_and_critic(make):
    agent = make.agent(
        loss=KL, critic_learning_rate=3e-3, optimization=OptimizationSettings(learning_rate_end=0.5)
    )
    made = agent.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    groups = {group["name"]: group for group in optimizer.param_groups}
    assert list(groups) == ["policy", "critic"]
    for name, module in (("policy", agent.policy), ("critic", agent.critic)):
        assert {id(parameter) for parameter in groups[name]["params"]} == {
            id(parameter) for parameter in module.parameters()
        }
    rates = []
    for _ in range(11):  # max_epochs is 10
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx([1e-3, 3e-3])
    assert rates[5] == pytest.approx([0.75e-3, 2.25e-3])
    assert rates[10] == pytest.approx([0.5e-3, 1.5e-3])


def test_parameter_groups_are_clipped_by_their_own_norm(make):
    agent = make.agent()
    optimizer = agent.configure_optimizers()["optimizer"]

    def set_norms(**norms):
        for group in optimizer.param_groups:
            count = sum(parameter.numel() for parameter in group["params"])
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, norms[group["name"]] / count**0.5)

    def norms():
        return [
            float(torch.cat([parameter.grad.flatten() for parameter in group["params"]]).norm())
            for group in optimizer.param_groups
        ]

    set_norms(policy=10.0, critic=0.25)
    agent.configure_gradient_clipping(optimizer, gradient_clip_val=1.0)
    assert norms() == pytest.approx([1.0, 0.25], rel=1e-4)
    set_norms(policy=5.0, critic=0.5)
    agent.configure_gradient_clipping(optimizer, gradient_clip_val=None)
    assert norms() == pytest.approx([5.0, 0.5], rel=1e-4)
    assert agent.gradient_norms == pytest.approx({"policy": 10.0, "critic": 0.5}, rel=1e-4)


def test_weights_without_decay_are_clipped_with_the_others_of_their_module(make):
    agent = make.agent(optimizer=functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1))
    optimizer = agent.configure_optimizers()["optimizer"]
    names = [group["name"] for group in optimizer.param_groups]
    assert names == ["policy", "policy/vectors", "critic", "critic/vectors"]
    for weight in agent.parameters():
        weight.grad = torch.ones_like(weight)
    agent.configure_gradient_clipping(optimizer, gradient_clip_val=1.0)
    for module in (agent.policy, agent.critic):
        clipped = torch.cat([weight.grad.flatten() for weight in module.parameters()])
        assert float(clipped.norm()) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize(
    ("limit", "algorithm", "expected"),
    [(0, None, [2.0, -0.5]), (0.0, "norm", [2.0, -0.5]), (1.0, "value", [1.0, -0.5])],
)
def test_gradients_are_clipped_as_a_trainer_says(make, limit, algorithm, expected):
    """A limit of 0 is none in Lightning."""
    agent = make.agent()
    optimizer = agent.configure_optimizers()["optimizer"]
    for number, module in enumerate((agent.policy, agent.critic)):
        for weight in module.parameters():
            weight.grad = torch.full_like(weight, (2.0, -0.5)[number])
    agent.configure_gradient_clipping(optimizer, limit, algorithm)
    for value, module in zip(expected, (agent.policy, agent.critic), strict=True):
        assert all(bool((weight.grad == value).all()) for weight in module.parameters())


def test_estimator_that_needs_values_requires_a_critic(make):
    bundle = make.bundle()
    settings = {
        "masks": Masks(),
        "loss": UpdateLoss(),
        "optimizer": functools.partial(torch.optim.AdamW, lr=1e-3),
        "engine": TransformersEngine,
    }
    with pytest.raises(ValueError, match=r"BilevelGAE needs a critic; set algorithm\.critic"):
        AgentModule(PolicyModule(bundle), None, estimator=BilevelGAE(), **settings)
    critic = CriticModule(bundle.hidden_size)
    agent = AgentModule(PolicyModule(bundle), critic, estimator=GroupRelative(), **settings)
    assert agent.critic is None  # not trained on noise where nothing reads it


def test_checkpoint_restores_the_sums_of_an_unfinished_update(make):
    agent, other = make.agent(), make.agent()
    agent.training_step(make.minibatch(make.batch(agent)), 0)
    agent.gradient_norms = {"policy": 2.0, "critic": 0.5}
    checkpoint: dict = {"state_dict": agent.state_dict()}
    agent.on_save_checkpoint(checkpoint)
    other.on_load_checkpoint(checkpoint)
    assert other.statistics.totals() == agent.statistics.totals()
    assert other.preparation.compute() == agent.preparation.compute()
    assert other.gradient_norms == agent.gradient_norms
