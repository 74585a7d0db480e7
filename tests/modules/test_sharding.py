"""FSDP2 on two ranks plays, scores and learns as two ranks with whole weights do."""

from __future__ import annotations

import json

import pytest
import torch
from support.models import sharded_agents
from support.runs.module_process import run_ranks, run_two_ranks

from ragen_pl.models.adapters import add_lora
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.modules.sharding import GatheredPolicy, is_sharded


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Results of both ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    run_two_ranks(sharded_agents.run, str(folder))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_two_ranks_with_sharded_weights_learn_as_with_whole_ones(ranks):
    results = [found["learned"] for found in ranks]
    # a step of several parts
    assert results[0]["full divergence, own critic"]["microbatches"] > 2
    for name, case in sharded_agents.CASES.items():
        for ranks in results:
            check_case(ranks[name], rounds=case.dtype is not torch.float32)


@pytest.mark.slow
def test_four_ranks_with_two_copies_of_the_state_learn_as_with_whole_weights(tmp_path):
    run_ranks(4, sharded_agents.run_hybrid, str(tmp_path))
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for name in sharded_agents.HYBRID:
        rounds = sharded_agents.CASES[name].dtype is not torch.float32
        for found in ranks:
            check_case(found[name], rounds=rounds)


def check_case(figures, *, rounds: bool) -> None:
    """Check what a rank saw in a case; where weights are in bfloat16, both ways round."""
    assert figures["same responses"]
    assert figures["prepared"] < (0.01 if rounds else 1e-6)
    assert figures["gradients"] < (0.03 if rounds else 1e-5)
    assert figures["weights"] < (0.01 if rounds else 1e-4)
    for norms, expected in figures["norms"]:
        # they are clipped to 0.5
        assert norms == pytest.approx(expected, rel=0.01 if rounds else 1e-5)
        assert max(norms.values()) > 0.5
    assert figures["same fingerprints"] and figures["rollout weights are freed"]
    assert figures["own share"] < 0.65 + figures["shared with the reference"] / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", sharded_agents.PUSHED)
def test_an_engine_gets_sharded_weights_layer_by_layer(ranks, name):
    for rank, figures in enumerate(found["pushed"][name] for found in ranks):
        assert figures["equal"] and figures["agreement"] < 1e-4
        # the second one fails before it takes a weight, then in the middle
        assert figures["errors"] == 2 * [("Fault: no room", "no room")[rank]]
        # a layer, and the weight that the engine got last
        assert figures["peak"] < 1.1 * (figures["layer"] + figures["weight"])
        assert figures["peak"] < 0.8 * figures["all"]
        assert figures["alive"] == 0 and figures["policy is left sharded"]


@pytest.mark.slow
def test_both_ranks_skip_a_step_that_is_not_finite_on_one(ranks):
    first, second = (found["skipped"] for found in ranks)
    assert first == second
    for name, norm in (("shard of a gradient", "nan"), ("loss", None)):
        figures = first[name]
        assert (figures["gradients"], figures["skipped"], figures["skipped after"]) == (0, 1, 0)
        assert figures["norm"] == norm if norm else float(figures["norm"]) > 1


def test_a_gathered_copy_has_the_models_weights_until_they_are_released(lm, vlm):
    for bundle in (lm, vlm):
        copy = GatheredPolicy(PolicyModule(bundle))
        model = copy.bundle.model
        assert copy.is_empty and all(weight.is_meta for weight in model.parameters())
        copy.gather()
        assert not copy.is_empty and not model.training
        ids = torch.arange(6)[None]
        with torch.no_grad():
            assert model(ids).logits.equal(bundle.model.eval()(ids).logits)
        own = {id(weight) for weight in bundle.model.parameters()}
        assert own.isdisjoint(map(id, model.parameters()))
        models = (model, bundle.model)
        tied = [each.get_output_embeddings().weight for each in models]
        words = [each.get_input_embeddings().weight for each in models]
        assert (tied[0] is words[0]) == (tied[1] is words[1])
        copy.release()
        assert copy.is_empty and all(weight.is_meta for weight in model.parameters())


def test_a_gathered_copy_takes_over_present_weights(make):
    bundle = make.bundle()
    copy = GatheredPolicy(PolicyModule(bundle))
    copy.gather()
    with torch.no_grad():
        bundle.model.get_input_embeddings().weight.add_(1.0)
    copy.release()
    copy.gather()
    words = copy.bundle.model.get_input_embeddings().weight
    assert words.equal(bundle.model.get_input_embeddings().weight)


def test_a_copy_without_weights_yields_the_present_adapters(make):
    bundle = make.bundle()
    add_lora(bundle.model, {"r": 2})
    policy = PolicyModule(bundle)
    copy = GatheredPolicy(policy)
    with torch.no_grad():
        for name, weight in bundle.model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    wanted, found = dict(policy.weights(adapters=True)), dict(copy.weights(adapters=True))
    assert wanted.keys() == found.keys() and len(wanted) > 0
    assert all(weight.equal(wanted[name]) for name, weight in found.items())
    # a rank whose engine has failed gathers what the others do
    with copy.exhausting_weights():
        pass
    assert copy._only_adapters


def test_without_a_sharding_strategy_nothing_is_sharded(make):
    agent = make.agent()
    agent.configure_model()
    assert not is_sharded(agent.policy) and not is_sharded(agent.critic)
