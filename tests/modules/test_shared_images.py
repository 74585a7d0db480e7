"""Images that several samples show are encoded once in a call of the policy or the critic."""

from __future__ import annotations

import pytest
import torch

from ragen_pl.data.collate import collate
from ragen_pl.data.settings import UpdateSettings
from ragen_pl.models.images import ImageEncoder, content_key
from ragen_pl.modules import forward
from ragen_pl.modules.critic import LastValueReadout
from ragen_pl.modules.policy import TokenReadout
from ragen_pl.modules.saliency import SaliencyReadout


@pytest.fixture
def encoded(monkeypatch) -> list[bytes]:
    """The contents that were encoded, in order."""
    contents: list[bytes] = []
    encode = ImageEncoder.encode_together

    def count(self, images):
        contents.extend(map(content_key, images))
        return encode(self, images)

    monkeypatch.setattr(ImageEncoder, "encode_together", count)
    return contents


def shown(trajectories) -> set[bytes]:
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    return {content_key(image) for turn in turns for image in turn.prompt_images}


@pytest.mark.parametrize("window", [1, 2])
def test_members_of_a_group_share_their_images_in_rollout_scoring_and_update(make, encoded, window):
    agent = make.agent(images=True, update=UpdateSettings(scoring="always"))
    trajectories = make.play(agent, groups=2, members=4, window=window)
    assert len(encoded) == len(set(encoded))
    contents = shown(trajectories)
    arrays = {id(i) for t in trajectories for turn in t.turns for i in turn.prompt_images}
    assert len(contents) < len(arrays)
    batch = collate(trajectories, agent.policy.bundle)
    assert {content_key(image.numpy()) for image in batch.images} == contents
    assert len(batch.images) == len(contents)

    encoded.clear()
    agent.prepare(batch)
    assert sorted(encoded) == sorted(contents)
    minibatch = make.minibatch(batch)
    minibatch.microbatches = list(torch.arange(len(batch.samples)).split(1))
    encoded.clear()
    agent.training_step(minibatch, 0).backward()
    assert sorted(encoded) == sorted(contents)


def test_shared_features_give_the_same_results_and_gradients(make, encoded):
    agent = make.agent(images=True)
    batch = collate(make.play(agent, groups=2, members=3), agent.policy.bundle)
    samples, each = batch.samples, list(torch.arange(len(batch.samples)).split(1))

    def gradients(calls: list[list[torch.Tensor]]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        agent.zero_grad()
        scores = sum(
            agent.policy(samples, batch.images, microbatches=rows).logprobs for rows in calls
        )
        scores.sum().backward()
        weights = agent.policy.named_parameters()
        return scores.detach(), {name: w.grad.clone() for name, w in weights if w.grad is not None}

    together, gradient = gradients([each])
    apart, expected = gradients([[rows] for rows in each])
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-5)
    assert gradient.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(gradient[name], value, atol=1e-4, rtol=1e-3, msg=name)
    readouts = [
        SaliencyReadout(),
        LastValueReadout(agent.critic),
        TokenReadout(critic=agent.critic),
    ]
    for readout in readouts:
        encoded.clear()
        agent.policy(samples, batch.images, microbatches=each, readout=readout)
        assert len(encoded) == len(batch.images)


def test_features_that_need_much_memory_are_not_held(make, encoded, monkeypatch):
    agent = make.agent(images=True)
    batch = collate(make.play(agent, groups=2, members=3), agent.policy.bundle)
    each = list(torch.arange(len(batch.samples)).split(1))
    monkeypatch.setattr(forward, "SHARED_BYTES", 1)
    encoded.clear()
    agent.policy(batch.samples, batch.images, microbatches=each)
    assert len(encoded) == len(batch.samples) > len(batch.images)


def test_episodes_without_a_group_keep_an_image_for_each_array(make):
    agent = make.agent(images=True)
    trajectories = make.play(agent, groups=3, members=1)
    again = make.play(agent, groups=3, members=1)
    for trajectory in again:
        trajectory.group += 3
    batch = collate([*trajectories, *again], agent.policy.bundle)
    assert len(batch.images) == 2 * len(collate(trajectories, agent.policy.bundle).images)
