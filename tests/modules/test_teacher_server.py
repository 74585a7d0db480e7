"""A teacher behind a server: its scores of the policy's tokens, failing servers, and what is refused."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from support.models.tiny_models import TEXT
from support.runs.composing import composed
from support.servers.fake_vllm import Server

from ragen_pl.algorithms.aggregation import Aggregation
from ragen_pl.algorithms.masks import sampled
from ragen_pl.assembly.component_checks import check_components
from ragen_pl.assembly.teacher_server import TeacherServer
from ragen_pl.config import ConfigError
from ragen_pl.engines.errors import RolloutError
from ragen_pl.environments.calls import make_environment
from ragen_pl.models.build import build_small_lm
from ragen_pl.modules.losses import ReferenceKL, UpdateLoss

LARGER = TEXT | {"hidden_size": 48, "num_hidden_layers": 3}
TARGET = "ragen_pl.assembly.teacher_server.TeacherServer"


@pytest.fixture(scope="module")
def teacher():
    """A larger model than the policy."""
    return build_small_lm(seed=7, text=LARGER)


@pytest.fixture
def servers(teacher):
    """Two servers of the teacher."""
    started = [Server(teacher), Server(teacher)]
    yield started
    for server in started:
        if not server.is_dead:
            server.die()


def distillation(reference, **changes) -> UpdateLoss:
    penalty = ReferenceKL(
        coefficient=1.0, estimator="k2", mask=sampled, aggregation=Aggregation.TOKEN_MEAN,
        reference=reference, **changes,
    )  # fmt: skip
    return UpdateLoss(policy_coefficient=0.0, value_coefficient=0.0, whiten=False, kl=penalty)


@pytest.mark.parametrize("window", [1, "all"])
def test_it_scores_the_sampled_tokens(make, teacher, servers, window):
    agent = make.agent(loss=distillation(TeacherServer(urls=[server.url for server in servers])))
    agent.loss.reference.check(agent.policy.bundle)
    batch = make.batch(agent, window=window)
    samples, expected = batch.samples, torch.zeros_like(batch.reference)
    for row in range(len(samples)):
        ids = samples.input_ids[row, : int(samples.length[row])]
        with torch.no_grad():
            logprobs = teacher.model(ids[None]).logits[0, :-1].log_softmax(-1)
        at = (samples.turn[row] >= 0).nonzero().flatten()
        expected[samples.token[row, at]] = logprobs[at - 1, ids[at]]
    assert torch.allclose(batch.reference, expected, atol=1e-5) and expected.std() > 0.01
    loss, gradients = make.gradient(agent, [make.minibatch(batch)])
    assert loss > 1e-3 and any(gradient.any() for gradient in gradients.values())
    # each took a part of the samples
    assert all(server.asked for server in servers)


def test_another_server_answers_where_one_fails(make, teacher, servers):
    urls = [server.url for server in servers]
    agent = make.agent(loss=distillation(TeacherServer(urls=urls)))
    expected = make.batch(agent).reference
    servers[0].faults = [503, "unlike", 500]
    assert torch.equal(make.batch(agent).reference, expected)
    assert not servers[0].faults


def test_a_server_that_gives_no_scores_is_an_error_with_its_reason(make, servers):
    servers[0].faults = [500] * 100_000
    url = servers[0].url
    agent = make.agent(loss=distillation(TeacherServer(urls=[url], timeout_s=0.2)))
    with pytest.raises(RolloutError, match=f"{url}.*no scores of the teacher within 0.2 s"):
        make.batch(agent)
    # a request that it refuses is not sent again
    servers[1].faults = [400]
    agent = make.agent(loss=distillation(TeacherServer(urls=[servers[1].url], concurrency=1)))
    with pytest.raises(RolloutError, match="status 400"):
        make.batch(agent)


def test_other_tokenizers_images_and_silent_servers_are_refused(make, servers):
    policy = make.bundle()
    server = TeacherServer(urls=[servers[0].url])
    server.check(policy)
    with pytest.raises(ConfigError, match=r"scores texts, and .* sees images"):
        server.check(make.bundle(images=True))
    servers[0].bundle = build_small_lm(text=TEXT, words=["left"])
    with pytest.raises(ConfigError, match="has another tokenizer than the trainer"):
        server.check(build_small_lm(text=TEXT, words=["up"]))
    servers[1].die()
    with pytest.raises(ConfigError, match="gives no answer that can be used"):
        replace(server, urls=[servers[1].url]).check(policy)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("algorithm.loss.kl.estimator=full_reverse",), "estimator=full_reverse: a server tells"),
        (("algorithm.loss.kl.estimator=k1",), "estimator=k1: in the loss"),
        (("algorithm.loss.kl.estimator=k2",), None),
        (("algorithm.loss.kl.estimator=k2", "rollout.temperature=0.7"), "at temperature 1"),
        (("algorithm.loss.kl.estimator=k2", "rollout.top_p=0.9"), "at temperature 1"),
    ],
)
def test_what_a_server_does_not_tell_is_refused_before_a_model_is_built(overrides, problem):
    cfg = composed(
        "env=frozenlake", "algorithm=opsd", "algorithm.loss.kl.hint=null",
        f"+algorithm.loss.kl.reference={{_target_: {TARGET}, urls: [x]}}", *overrides,
    )  # fmt: skip
    environments = {cfg.env.name: make_environment(cfg.env).unwrapped}
    with pytest.raises(ConfigError, match=problem) if problem else nullcontext():
        check_components(cfg, environments)
