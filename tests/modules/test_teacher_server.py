"""A teacher behind a server: its scores of the policy's tokens, failing servers, and what is refused."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from support.models.tiny_models import TEXT
from support.runs.composing import composed
from support.servers.fake_vllm import Server

from ragen_pl.algorithms.aggregation import Aggregation
from ragen_pl.algorithms.kl import DivergenceWeights
from ragen_pl.algorithms.masks import sampled
from ragen_pl.assembly.component_checks import check_components
from ragen_pl.assembly.teacher import Teacher
from ragen_pl.assembly.teacher_server import TeacherServer, most_likely
from ragen_pl.config import ConfigError
from ragen_pl.data.batch import TrajectoryBatch
from ragen_pl.data.loader import MinibatchLoader
from ragen_pl.engines.errors import RolloutError
from ragen_pl.environments.calls import make_environment
from ragen_pl.models.build import build_small_lm
from ragen_pl.modules.losses import ReferenceKL, UpdateLoss
from ragen_pl.prompts.hint import Hint

LARGER = TEXT | {"hidden_size": 48, "num_hidden_layers": 3}
FULL = ("algorithm.loss.kl.estimator=full_reverse",)
TOP = (*FULL, "algorithm.loss.kl.top_k_of=reference")
WEIGHTS = "algorithm.loss.kl.weights={_target_: ragen_pl.algorithms.kl.DivergenceWeights}"
ADAPTIVE = (
    "rollout.adaptive_temperature={_target_: ragen_pl.rollout.temperature.AdaptiveTemperature}"
)
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


def distillation(reference, *, estimator="k2", **changes) -> UpdateLoss:
    penalty = ReferenceKL(
        coefficient=1.0, estimator=estimator, mask=sampled, aggregation=Aggregation.TOKEN_MEAN,
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


@pytest.fixture(scope="module")
def folder(teacher, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("teacher")
    teacher.save(path)
    return str(path)


@pytest.mark.parametrize(
    ("window", "estimator", "number", "hint"),
    [
        (1, "full_reverse", 20, None),
        (2, "full", 3, None),
        ("all", "full_reverse", 1, None),
        ("all", "full", 8, Hint(template="{observation} {plan}")),
    ],
)
def test_top_k_is_that_of_the_same_teacher_without_a_server(
    make, servers, folder, window, estimator, number, hint
):
    """In value and gradient, however the samples are split, in packed rows and in several chunks of the head."""
    settings = {"estimator": estimator, "top_k": number, "top_k_of": "reference", "hint": hint}
    agent = make.agent(loss=distillation(Teacher(path=folder), **settings))
    expected_loss, expected = make.gradient(
        agent, [make.minibatch(make.batch(agent, window=window))]
    )
    for server in servers:
        # the other teacher gives them no probability either
        server.impossible = [*agent.policy.bundle.banned_token_ids]
    served = TeacherServer(urls=[server.url for server in servers])
    agent = make.agent(loss=distillation(served, **settings))
    batch = make.batch(agent, window=window)
    assert batch.reference_ids.shape[1] == number == batch.reference.shape[1] - 1
    assert expected_loss > 1e-3 and any(each.any() for each in expected.values())
    again = TrajectoryBatch.from_state_dict(batch.state_dict())
    longest = int(batch.samples.length.max())
    agent.policy.bundle.packs_rows = window == 2
    agent.policy.logits_mib = 0.05 if window == 1 else 512.0
    for parts in (
        [make.minibatch(batch)],
        list(MinibatchLoader(again, epochs=1, minibatches=1, accumulate=3)),
        list(MinibatchLoader(batch, epochs=1, minibatches=1, tokens_per_microbatch=longest)),
    ):
        loss, gradients = make.gradient(agent, parts)
        assert loss == pytest.approx(expected_loss, abs=1e-5)
        for name, gradient in expected.items():
            assert torch.allclose(gradients[name], gradient, atol=1e-5), name


def test_ids_that_the_policy_never_samples_are_left_out_of_the_top(make, servers):
    servers[0].bundle = build_small_lm(seed=7, text=LARGER)
    weights = DivergenceWeights(turn_decay=0.5, confidence=False)
    loss = distillation(
        TeacherServer(urls=[servers[0].url]), estimator="full_reverse", top_k=4, top_k_of="reference", weights=weights
    )  # fmt: skip
    agent = make.agent(loss=loss)
    banned = [*agent.policy.bundle.banned_token_ids]
    with torch.no_grad():
        servers[0].bundle.model.get_output_embeddings().weight[banned[:3]] *= 10.0
    batch = make.batch(agent)
    kinds = set()
    for ids, logprobs in zip(batch.reference_ids.tolist(), batch.reference.tolist(), strict=True):
        known = dict(zip(ids, logprobs, strict=False))
        kinds.add(len(known))
        assert not known.keys() & {*banned}
        assert sum(map(math.exp, [*known.values(), logprobs[-1]])) == pytest.approx(1, abs=1e-5)
    assert len(kinds) > 1 and batch.kl_weight.unique().numel() > 1
    loss, _ = make.gradient(agent, [make.minibatch(batch)])
    assert loss > 1e-3


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        # sum, an id of its own beside the two most likely, an id that is not possible
        ({7: 0.01, 1: 0.5, 2: 0.25}, ([1, 2], [0.5, 0.25, 0.25])),
        ({2: 0.25, 1: 0.5}, ([1, 2], [0.5, 0.25, 0.25])),
        ({7: 0.01, 1: 0.5, 90: 0.25}, ([1, 1], [2 / 3, 2 / 3, 1 / 3])),
        ({7: 0.1, 91: 0.5, 90: 0.25}, ([7, 7], [0.4, 0.4, 0.6])),
        ({7: 0.75}, ([7, 7], [0.75, 0.75, 0.25])),
        ({7: 1.0, 1: 0.0}, ([7, 1], [1.0, 0.0, 2**-23])),
        ({7: 0.9, 1: 0.9}, None),
    ],
)
def test_what_is_known_of_a_position(known, expected):
    logprobs = {one: math.log(max(value, 1e-30)) for one, value in known.items()}
    with nullcontext() if expected else pytest.raises(ValueError, match="a sum above 1"):
        ids, found = most_likely(logprobs, 7, 2, lambda one: one < 90)
        assert ids == expected[0]
        assert [math.exp(one) for one in found] == pytest.approx(expected[1], abs=1e-6)
        assert found[-1] == pytest.approx(math.log(expected[1][-1]), abs=1e-5)


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
        (FULL, "top_k=None and top_k_of=policy: a server tells the log-probs of its own"),
        ((*FULL, "algorithm.loss.kl.top_k=8"), "top_k=8 and top_k_of=policy: a server tells"),
        ((*TOP, "algorithm.loss.kl.top_k=20"), None),
        ((*TOP, "algorithm.loss.kl.top_k=21"), "top_k=21: .* does not tell so many .* 20.*; start"),
        ((*TOP, "algorithm.loss.kl.top_k=8", WEIGHTS), "weights.confidence=true: it is read from"),
        ((*TOP, "algorithm.loss.kl.top_k=8", "rollout.temperature=0.7"), "at temperature 1"),
        ((*TOP, "algorithm.loss.kl.top_k=8", "URLS=[127.0.0.1:1]"), "gives no answer that can"),
        (("algorithm.loss.kl.estimator=k1",), "estimator=k1: in the loss"),
        (("algorithm.loss.kl.estimator=k2",), None),
        (("algorithm.loss.kl.estimator=k2", "rollout.temperature=0.7"), "at temperature 1"),
        (("algorithm.loss.kl.estimator=k2", "rollout.top_p=0.9"), "at temperature 1"),
        (("algorithm.loss.kl.estimator=k2", ADAPTIVE), "at temperature 1"),
    ],
)
def test_what_a_server_does_not_tell_is_refused_before_a_model_is_built(
    servers, overrides, problem
):
    cfg = composed(
        "env=frozenlake", "algorithm=opsd", "algorithm.loss.kl.hint=null",
        f"+algorithm.loss.kl.reference={{_target_: {TARGET}, urls: [{servers[0].url}]}}",
        *[one.replace("URLS", "algorithm.loss.kl.reference.urls") for one in overrides],
    )  # fmt: skip
    environments = {cfg.env.name: make_environment(cfg.env).unwrapped}
    with pytest.raises(ConfigError, match=problem) if problem else nullcontext():
        check_components(cfg, environments)


def test_the_remedy_for_another_distribution_is_accepted(servers):
    base = (
        "env=frozenlake", "algorithm=opsd", "algorithm.loss.kl.hint=null", "algorithm.loss.kl.estimator=k2",
        f"+algorithm.loss.kl.reference={{_target_: {TARGET}, urls: [{servers[0].url}]}}",
    )  # fmt: skip
    given = ("rollout.temperature=0.7", "rollout.top_p=0.9", "rollout.top_k=5", "rollout.min_p=0.1")

    def check(*overrides: str) -> None:
        cfg = composed(*base, *overrides)
        check_components(cfg, {cfg.env.name: make_environment(cfg.env).unwrapped})

    with pytest.raises(ConfigError, match="at temperature 1") as refused:
        check(*given)
    remedy = re.findall(r"rollout\.\w+=\S+", str(refused.value))
    assert len(remedy) == 5
    check(*given, *remedy)
