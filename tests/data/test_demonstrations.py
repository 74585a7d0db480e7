"""Demonstrations of the warm start."""

import logging
import re

import torch
from support.episodes.small_lakes import ENVIRONMENT

import envs  # noqa: F401 - registers the environments
from envs.policies import OptimalPolicy
from ragen_pl.data.demonstrations import DemonstrationDataModule
from ragen_pl.data.settings import WarmStartSettings
from ragen_pl.environments.manager import EnvironmentManager
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy

# ---- demonstrations


def demonstrations(lm, *, policy=None, proxy=None, **changes) -> DemonstrationDataModule:
    environments = EnvironmentManager(**ENVIRONMENT)
    data = DemonstrationDataModule(
        AgentProxy(environments=environments, context=ContextManager(lm), **(proxy or {})),
        policy=policy or OptimalPolicy(),
        settings=WarmStartSettings(
            **({"episodes": 12, "batch_size": 8, "steps": 20, "gamma": 0.5} | changes)
        ),
        seed=0,
    )
    data.setup("fit")
    return data


def test_demonstrations_are_served_in_steps_of_the_batch_size(lm):
    data = demonstrations(lm)
    samples, loader = data.batch.samples, data.train_dataloader()
    assert data.statistics["success"] == 1.0 and len(loader) >= 20
    an_epoch = -(-len(samples) // 8)
    sizes = [len(step.samples) for _, step in zip(range(an_epoch), loader, strict=False)]
    assert sum(sizes) == len(samples) and max(sizes) <= 8


def test_demonstrations_take_the_stages_of_the_warm_start_in_turn(lm):
    # a turn is a step of a shortest path
    turns = demonstrations(lm, stages=[{}, {"min_distance": 4}]).batch.episodes.turns
    assert len(turns) == 12 and turns[1::2].min() >= 4 and turns[::2].min() < 4


class Stays(OptimalPolicy):
    """Walks into the wall."""

    def act(self, env, rng):
        return 0


def test_a_demonstrator_without_success_is_reported(lm, caplog):
    caplog.set_level(logging.WARNING)
    demonstrations(lm)
    assert "no success" not in caplog.text
    data = demonstrations(lm, policy=Stays(), episodes=4)
    if data.statistics["success"] == 0:
        target = ENVIRONMENT["target"]
        assert (
            f"no success in 4 episodes, mean return 0; check info['success'] of {target}"
            in caplog.text
        )


class Forgetful(OptimalPolicy):
    """Raises in some states."""

    def act(self, env, rng):
        if env.unwrapped.state_key().endswith(("0", "4")):
            raise LookupError("where was I")
        return super().act(env, rng)


def test_demonstrations_that_fail_are_left_out_and_reported(lm, caplog):
    caplog.set_level(logging.WARNING)
    data = demonstrations(lm, policy=Forgetful())
    assert 0 < data.statistics["failed"] < 1
    assert re.search(r"\d+ of 12 episodes failed with Forgetful: where was I", caplog.text)
    assert "max_response_tokens" not in caplog.text


def test_demonstrations_that_a_policy_could_not_sample_are_reported(lm, caplog):
    caplog.set_level(logging.WARNING)
    demonstrations(lm, proxy={"max_response_tokens": 8})
    assert re.search(r"max_response_tokens=8: (\d+) of \1 demonstrated responses", caplog.text)


def test_target_of_a_demonstrated_turn_is_its_discounted_return(lm):
    data = demonstrations(lm)
    samples = data.batch.samples
    for row in range(len(samples)):
        episode = int(samples.episode[row])
        sampled = samples.turn[row] >= 0
        turn, turns = int(samples.turn[row].max()), int(data.batch.episodes.turns[episode])
        assert (samples.returns[row][sampled] == 0.5 ** (turns - 1 - turn)).all()
        assert (samples.returns[row][~sampled] == 0).all()


def test_ranks_with_different_numbers_of_samples_take_the_same_number_of_steps(lm, monkeypatch):
    name = "ragen_pl.data.demonstrations"
    monkeypatch.setattr(f"{name}.world_size", lambda: 2)
    ranks = []
    for number in range(2):
        monkeypatch.setattr(f"{name}.rank", lambda number=number: number)
        ranks.append(demonstrations(lm, episodes=13, batch_size=2))
    counts = [len(data.batch.samples) for data in ranks]
    assert counts[0] != counts[1]

    def summed(
        tensor,
    ):  # the number of samples is the one scalar; counts of tokens don't matter here
        return torch.tensor(sum(counts)) if tensor.ndim == 0 else tensor

    monkeypatch.setattr(f"{name}.sum_over_ranks", summed)
    lengths = {len(data.train_dataloader()) for data in ranks}
    assert len(lengths) == 1 and lengths.pop() >= 20
