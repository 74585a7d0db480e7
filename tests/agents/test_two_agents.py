"""A lead and a scout of one policy: two samples, rewards of each, and credit that is conserved over both."""

from __future__ import annotations

import pytest
import torch
from support.episodes.agent_programs import AGENTS, bundle_of, check_record, play_program

from ragen_pl.algorithms.advantages.bilevel import BilevelGAE
from ragen_pl.data.batch import CreditLayout
from ragen_pl.data.collate import collate
from ragen_pl.modules.credit import assign_credit
from ragen_pl.modules.masking import Masks, compute_token_masks


@pytest.mark.parametrize(
    ("says", "report", "answer"),
    [
        (("go", "a aa", "aha a"), 0.5, 1.0),
        (("go", "o", "a"), 0.0, 1.0),
        (("go", "a", "o"), 0.5, 0.0),
    ],
)
def test_credit_is_conserved_over_two_agents(monkeypatch, says, report, answer):
    monkeypatch.setenv("PYTHONPATH", str(AGENTS))
    trajectory, engine = play_program(
        lambda prompt, turn: says[turn], function="two_agents.play", task={"letter": "a"}
    )
    # the lead's two calls are one sample, the scout's call is another
    check_record(trajectory, engine, samples=2)
    assert [turn.kind.history for turn in trajectory.turns] == ["first", "system", "joined"]
    _, scouted, last = trajectory.turns
    assert says[0] in scouted.observation.text and says[1] in last.observation.text
    assert [turn.reward for turn in trajectory.turns] == [0.0, report, answer]
    batch = collate([trajectory], bundle_of("qwen2_5"))
    assert float(batch.episodes.turn_rewards.sum()) == trajectory.reward == report + answer
    # without discounts and values, the advantage of a token is all reward that follows it
    layout = CreditLayout.of(batch)
    kept = compute_token_masks(batch, layout, Masks(), kl=None)
    undiscounted = BilevelGAE(gamma_turn=1.0, lam_turn=1.0)
    batch.samples.values.zero_()
    found = assign_credit(batch, layout, kept, undiscounted, whiten_advantages=False).advantages
    lengths = [len(turn.response_ids) for turn in trajectory.turns]
    expected = [report + answer] * (lengths[0] + lengths[1]) + [answer] * lengths[2]
    assert torch.equal(found.flatten(), torch.tensor(expected))
