"""Gradient saliency, importance masks and their metrics."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_pl.algorithms.masks import top_in_turn
from ragen_pl.data.collate import as_dummy_batch, collate
from ragen_pl.models.inputs import run_decoder
from ragen_pl.modules.forward import sample_inputs
from ragen_pl.modules.masking import Importance, Masks
from ragen_pl.modules.saliency import SaliencyReadout, embeddings_replaced
from ragen_pl.trajectory import Span


@given(
    seed=st.integers(0, 10_000), fraction=st.sampled_from([0.01, 0.1, 0.3, 0.5, 0.9, 1.0]),
    tokens=st.integers(1, 12),
)  # fmt: skip
@settings(max_examples=60)
def test_top_in_turn_equals_sorting_each_turn(seed, fraction, tokens) -> None:
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 4, (3, tokens), generator=draw).float()  # many ties
    turn = torch.randint(-1, 3, (3, tokens), generator=draw)
    turn = torch.where(turn >= 0, turn.cummax(1).values, -1)
    mask = (torch.rand(3, tokens, generator=draw) < 0.7) & (turn >= 0)
    top = top_in_turn(scores, mask, turn, fraction=fraction)
    for row in range(3):
        for number in range(3):
            inside = [t for t in range(tokens) if mask[row, t] and turn[row, t] == number]
            best = sorted(inside, key=lambda t: (-scores[row, t].item(), t))
            count = max(1, -int(-fraction * 100 * len(inside) // 100)) if inside else 0
            assert {t for t in inside if top[row, t]} == set(best[:count])
    assert not (top & ~mask).any()


@pytest.mark.parametrize("images", [False, True])
def test_saliency_equals_the_change_when_an_embedding_fades(make, images) -> None:
    agent = make.agent(images=images)
    batch = collate(make.play(agent, groups=2, members=1), agent.policy.bundle)
    samples = batch.samples
    rows = torch.tensor([1])
    assert (samples.spans[1] == Span.ACTION).any()
    scores = agent.policy(samples, batch.images, microbatches=[rows], readout=SaliencyReadout())[1]

    def actions(embeds) -> torch.Tensor:
        policy = agent.policy
        columns = ((samples.spans[1] == Span.ACTION) & (samples.turn[1] >= 0)).nonzero()[:, 0]
        states = policy.bundle.backbone(inputs_embeds=embeds, use_cache=False).last_hidden_state
        banned = torch.tensor(policy.bundle.banned_token_ids)
        logits = policy.bundle.lm_head(states[0, columns - 1]).index_fill(-1, banned, -1e30)
        return logits.log_softmax(-1).gather(-1, samples.input_ids[1, columns][:, None]).sum()

    with torch.no_grad():
        entering: list[torch.Tensor] = []
        inputs = sample_inputs(agent.policy.bundle, samples, batch.images, rows)
        with embeddings_replaced(
            agent.policy.bundle, lambda states: entering.append(states) or states
        ):
            run_decoder(agent.policy.bundle, inputs)
        (embeds,) = entering
        for place in range(0, int(samples.length[1]), 3):
            down, up = embeds.clone(), embeds.clone()
            down[0, place] *= 0.99
            up[0, place] *= 1.01
            slope = abs(float(actions(up) - actions(down))) / 0.02
            assert float(scores[place]) == pytest.approx(slope, rel=0.05, abs=2e-3)


@pytest.mark.parametrize("window", [1, "all"])
def test_masks_keep_actions_and_the_share_of_each_turn(make, window) -> None:
    importance = Importance(loss=0.25, advantage=0.5)
    agent = make.agent(masks=Masks(importance=importance))
    trajectories = make.play(agent, window=window)
    for turn in trajectories[0].turns[:1]:  # a response without an action keeps all it has
        turn.spans[:] = int(Span.THINK)
    batch = agent.prepare(collate(trajectories, agent.policy.bundle))
    samples = batch.samples
    action = (samples.turn >= 0) & (samples.spans == Span.ACTION)
    assert samples.loss_mask[action].all() and samples.advantage_mask[action].all()
    assert samples.loss_mask[samples.turn >= 0].float().mean() < 0.8
    for row, episode in enumerate(samples.episode.tolist()):
        for number in samples.turn[row].unique().tolist()[1:]:
            here = samples.turn[row] == number
            others = here & ~action[row]
            acted = (here & action[row]).any()
            kept = int((samples.loss_mask[row] & others).sum())
            want = max(1, -int(-int(others.sum()) // 4)) if acted else int(others.sum())
            assert kept == min(want, int(others.sum())), (episode, number)
            assert samples.advantage_mask[row, here].any()
    metrics = agent.importance.compute()
    shares = [value for name, value in metrics.items() if name.startswith("score_share")]
    assert sum(shares) == pytest.approx(1.0)
    assert metrics["kept_action"] == 1.0 and metrics["kept_think"] < 1.0
    assert metrics["score_share_text"] > 0


def test_shares_of_one_change_nothing(make) -> None:
    trajectories = make.play(make.agent())
    plain, whole = make.agent(), make.agent(masks=Masks(importance=Importance()))
    ours = plain.prepare(collate(trajectories, plain.policy.bundle)).samples
    theirs = whole.prepare(collate(trajectories, whole.policy.bundle)).samples
    for name in ("loss_mask", "advantage_mask", "loss_weight", "advantages", "returns"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def test_importance_masks_accept_a_dummy_batch(make) -> None:
    agent = make.agent(masks=Masks(importance=Importance(loss=0.5)))
    batch = as_dummy_batch(collate(make.play(agent), agent.policy.bundle))
    assert not agent.prepare(batch).samples.weight.any()


@pytest.mark.parametrize("wrong", [{"loss": 0.0}, {"advantage": 1.5}])
def test_wrong_shares_are_rejected(wrong) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Importance(**wrong)
    with pytest.raises(ValueError, match="observations"):
        replace(Masks(observations=True), importance=Importance())
