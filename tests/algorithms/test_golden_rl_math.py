"""Formulas against the recorded metrics of reference implementations, to float32 accuracy."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ragen_pl.algorithms.advantages.bilevel import bilevel_gae
from ragen_pl.algorithms.advantages.gae import masked_gae
from ragen_pl.algorithms.advantages.group import dr_grpo, grpo, rloo
from ragen_pl.algorithms.advantages.reinforce import reinforce_plus_plus
from ragen_pl.algorithms.aggregation import Aggregation, aggregate
from ragen_pl.algorithms.kl import KLEstimator, kl_estimate
from ragen_pl.algorithms.policy_loss import clipped_surrogate
from ragen_pl.algorithms.value_loss import value_loss
from ragen_pl.algorithms.whitening import whiten

GOLDEN = Path(__file__).parents[1] / "golden" / "rl_math.json"
CASES = json.loads(GOLDEN.read_text())["cases"]
ESTIMATORS = {
    "kl": KLEstimator.K1,
    "abs": KLEstimator.ABS,
    "mse": KLEstimator.K2,
    "low_var_kl": KLEstimator.K3,
}


def read(part: dict) -> dict:
    """Make tensors of the lists, bool of the mask."""
    made = {k: torch.tensor(v) if isinstance(v, list) else v for k, v in part.items()}
    return made | ({"mask": made["mask"] != 0} if "mask" in made else {})


def of(*kinds: str) -> pytest.MarkDecorator:
    chosen = [(i, case) for i, case in enumerate(CASES) if case["kind"] in kinds]
    assert len(chosen) >= 4
    named = [pytest.param(case, id=f"{i}-{case['kind']}") for i, case in chosen]
    return pytest.mark.parametrize("case", named)


def same(actual: Tensor, expected: Tensor | float) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float32)
    torch.testing.assert_close(actual.float(), expected, rtol=2e-6, atol=2e-6)


def counts(mask: Tensor) -> dict[str, Tensor]:
    """Return tokens and sequences of a batch that is a whole optimizer step."""
    return {"tokens": mask.sum(), "sequences": mask.bool().any(1).sum()}


@of("gae", "gae_explicit")
def test_masked_gae(case: dict) -> None:
    given, expected = read(case["inputs"]), read(case["outputs"])
    mask = given["mask"]
    advantages, returns = masked_gae(
        given["rewards"],
        given["values"],
        mask,
        gamma=given["gamma"],
        lam=given["lam"],
        bootstrap=given.get("bootstrap"),
    )
    same(advantages, expected["advantages"])
    # One reference leaves the carried value behind in the returns off the mask.
    same(returns, torch.where(mask, expected["returns"], 0.0))


@of("bilevel_gae", "bilevel_gae_explicit")
def test_bilevel_gae(case: dict) -> None:
    given, expected = read(case["inputs"]), read(case["outputs"])
    advantages, returns = bilevel_gae(
        given["rewards"],
        given["values"],
        given["turn"],
        gamma_turn=given["gamma_turn"],
        lam_turn=given.get("lam_turn", given.get("lam")),
        gamma_token=given.get("gamma_token", given.get("gamma")),
        lam_token=given.get("lam_token", given.get("lam")),
        bootstrap=given.get("bootstrap"),
    )
    same(advantages, expected["advantages"])
    same(returns, expected["returns"])
    if "whitened" in expected:
        same(whiten(advantages, given["turn"] >= 0), expected["whitened"])


@pytest.mark.parametrize(
    ("kind", "function"), [("grpo", grpo), ("dr_grpo", dr_grpo), ("rloo", rloo)]
)
def test_group_baselines(kind: str, function) -> None:
    cases = [case for case in CASES if case["kind"] == kind]
    assert len(cases) == 4
    for case in cases:
        given = read(case["inputs"])
        same(function(given["returns"], given["groups"]), read(case["outputs"])["advantages"])


@of("reinforce_plus_plus")
def test_reinforce_plus_plus(case: dict) -> None:
    given = read(case["inputs"])
    advantages, _ = reinforce_plus_plus(given["rewards"], given["mask"], gamma=given["gamma"])
    same(advantages, read(case["outputs"])["advantages"])


@of("ppo_loss")
def test_policy_loss(case: dict) -> None:
    given, how = read(case["inputs"]), Aggregation(case["inputs"]["aggregation"])
    mask = given["mask"]
    loss = clipped_surrogate(
        given["logprobs"],
        given["old_logprobs"],
        given["advantages"],
        mask,
        clip_low=given["clip_low"],
        clip_high=given["clip_high"],
        dual_clip=given["dual_clip"],
    )
    same(aggregate(loss.losses, mask, how=how, **counts(mask)), case["outputs"]["loss"])


@of("value_loss")
def test_value_loss(case: dict) -> None:
    given, how = read(case["inputs"]), Aggregation.TOKEN_MEAN
    mask, old = given["mask"], given["old_values"]
    loss = value_loss(given["values"], given["returns"], mask, old_values=old, clip=given["clip"])
    same(aggregate(loss.losses, mask, how=how, **counts(mask)), case["outputs"]["loss"])


@of("kl")
def test_kl_estimators(case: dict) -> None:
    given = read(case["inputs"])
    how = ESTIMATORS[given["estimator"]]
    same(
        kl_estimate(given["logprobs"], given["ref_logprobs"], how=how), read(case["outputs"])["kl"]
    )
