"""Leaving patches and turns out: which have the lowest scores, and that engine and trainer see the same prompt."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.episodes.trajectories import responses, roll_out, starts
from support.models.family_models import tiny

from ragen_pl.data.collate import collate, split_into_samples
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.occlusion import occlusion_scores
from ragen_pl.engines.protocol import GenerationRequest, Prompt, generate
from ragen_pl.environments.manager import EnvironmentManager
from ragen_pl.environments.mixture import EnvironmentMixture
from ragen_pl.models.distribution import log_distribution
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.prompts.leave_out import LeaveOut
from ragen_pl.rollout.proxy import AgentProxy


def played(
    bundle, *, window, leave_out, visual=True, slots=64, groups=5, engine=None, **environment
):
    target = "ragen/FrozenLakeVisual-v0" if visual else "ragen/FrozenLake-v0"
    proxy = AgentProxy(
        environments=EnvironmentManager(
            target=target, invalid_ends=False, **({"max_turns": 4} | environment)
        ),
        context=ContextManager(bundle, window=window, system_prompt=None, leave_out=leave_out),
        max_response_tokens=10,
        num_envs=slots,
    )
    return roll_out(proxy, engine or TransformersEngine(PolicyModule(bundle)), starts(groups))


def mismatch(bundle, trajectories) -> float:
    """The largest difference between the trainer's log-probs and the engine's."""
    batch = collate(trajectories, bundle)
    with torch.no_grad():
        logprobs = PolicyModule(bundle)(batch.samples, batch.images).logprobs
    return float((logprobs - batch.samples.rollout_logprobs)[batch.samples.turn >= 0].abs().max())


def test_lowest_scores_are_dropped() -> None:
    rule = LeaveOut(patches=0.5, turns=0.5)
    ids = np.array([7, 9, 9, 9, 9, 8, 9, 9])  # images of four and two patches
    scores = np.array([5.0, 0.1, 0.4, 0.1, 0.2, 0.0, 0.3, 0.3])
    left, shown = rule.drop_patches(ids, scores, slot=9, patches=[4, 2])
    assert left.tolist() == [7, 9, 9, 8, 9]
    assert [part.tolist() for part in shown] == [[1, 3], [0]]
    assert rule.dropped_turns([3.0, 1.0, 2.0, 1.0, 9.0]) == {1, 3}
    assert rule.dropped_turns([3.0]) == frozenset()
    assert LeaveOut(patches=0.99).drop_patches(ids[:5], scores[:5], slot=9, patches=[4])[1][
        0
    ].tolist() == [1]


@pytest.mark.parametrize("window", [1, 2, "all"])
@pytest.mark.parametrize("shares", [(0.5, 0.0), (0.0, 0.6), (0.25, 0.5)])
def test_engine_and_trainer_see_the_same_prompt(vlm, window, shares) -> None:
    patches, turns = shares
    trajectories = played(vlm, window=window, leave_out=LeaveOut(patches=patches, turns=turns))
    slot = vlm.image_token_id
    for trajectory in trajectories:
        for number, turn in enumerate(trajectory.turns):
            whole = vlm.num_image_tokens(turn.prompt_images[-1])
            slots = int((turn.prompt_ids == slot).sum())
            shown = number + 1 if window == "all" else min(number + 1, window)
            left_out = int(turns * (shown - 1) + 1e-9)
            assert len(turn.turns_left_out) == left_out
            assert len(turn.prompt_images) == shown - left_out
            kept = whole - int(patches * whole)
            assert slots == len(turn.prompt_images) * (kept if patches else whole)
            if patches:
                assert [len(part) for part in turn.prompt_patches] == [kept] * (shown - left_out)
    assert mismatch(vlm, trajectories) < 5e-5


def test_wrong_patches_show_up_as_a_mismatch(vlm) -> None:
    trajectories = played(vlm, window=1, leave_out=LeaveOut(patches=0.5))
    for trajectory in trajectories:
        for turn in trajectory.turns:
            turn.prompt_patches = [np.arange(len(part)) for part in turn.prompt_patches]
    assert mismatch(vlm, trajectories) > 1e-2


def test_shares_of_zero_change_nothing(vlm, lm) -> None:
    for bundle, visual in ((vlm, True), (lm, False)):
        plain = played(bundle, window="all", leave_out=None, visual=visual)
        none = played(bundle, window="all", leave_out={"patches": 0.0, "turns": 0.0}, visual=visual)
        assert responses(plain) == responses(none)
        for ours, theirs in zip(plain, none, strict=True):
            for turn, other in zip(ours.turns, theirs.turns, strict=True):
                assert turn.response_logprobs.tolist() == other.response_logprobs.tolist()
                assert other.prompt_patches is None and other.turns_left_out == ()
        assert collate(plain, bundle).samples.patches.shape[1:] == (0, 0)


def test_leave_out_does_not_depend_on_num_envs(vlm) -> None:
    rule = LeaveOut(patches=0.5, turns=0.5)
    many = played(vlm, window="all", leave_out=rule)
    few = played(vlm, window="all", leave_out=rule, slots=2)
    assert responses(many) == responses(few)


def test_leave_out_does_not_depend_on_the_other_environments_of_a_mixture(vlm) -> None:
    """Responses of each have a limit of their own."""

    def patches(slots: int) -> list[list[int]]:
        managers = {
            str(limit): EnvironmentManager(
                target="ragen/FrozenLakeVisual-v0", max_turns=1, max_response_tokens=limit
            )
            for limit in (1, 10)
        }
        proxy = AgentProxy(
            environments=EnvironmentMixture(managers),
            context=ContextManager(vlm, window=1, leave_out=LeaveOut(patches=0.5)),
            max_response_tokens=10,
            num_envs=slots,
        )
        specs = [replace(spec, environment=name) for spec in starts(4) for name in managers]
        episodes = roll_out(proxy, TransformersEngine(PolicyModule(vlm)), specs)
        return [episode.turns[0].prompt_patches[0].tolist() for episode in episodes]

    assert patches(slots=8) == patches(slots=1)


def test_patches_with_the_highest_occlusion_scores_are_shown(vlm) -> None:
    (trajectory,) = played(vlm, window=1, leave_out=LeaveOut(patches=0.5), groups=1, max_turns=1)
    (turn,) = trajectory.turns
    whole = played(vlm, window=1, leave_out=None, groups=1, max_turns=1)[0].turns[0].prompt_ids
    prompt = Prompt(ids=whole, unexpanded_ids=whole, images=turn.prompt_images)
    slots = np.flatnonzero(whole == vlm.image_token_id)
    engine = TransformersEngine(PolicyModule(vlm))
    parts = [*slots[:, None], slots[[0, 3]]]
    (scores,) = occlusion_scores(vlm, engine, [prompt], [parts], max_tokens=[10])
    shown = set(turn.prompt_patches[0].tolist())
    rest = set(range(len(slots))) - shown
    assert min(scores[list(shown)]) >= max(scores[list(rest)]) > 0
    greedy = GenerationRequest(session=0, prompt=prompt, max_tokens=10, temperature=0.0, seed=0)
    response = generate(engine, [greedy], keep=False)[0].ids
    left = np.delete(np.arange(len(slots)), [0, 3])
    full, less = (
        distributions(vlm, ids, turn.prompt_images[0], patches, response)
        for ids, patches in (
            (whole, np.arange(len(slots))),
            (np.delete(whole, slots[[0, 3]]), left),
        )
    )
    assert scores[-1] == pytest.approx(float((full.exp() * (full - less)).sum()), rel=1e-3)


def distributions(bundle, ids, image, patches, response) -> torch.Tensor:
    """Log-probs that predict a response's tokens, by a forward of its own."""
    tokens = torch.from_numpy(np.concatenate([ids, response]))
    with torch.no_grad():
        embeds = bundle.model.get_input_embeddings()(tokens)
        features = bundle.images.encode([image]).tokens[patches]
        embeds[tokens == bundle.image_token_id] = features
        states = bundle.backbone(inputs_embeds=embeds[None], use_cache=False).last_hidden_state[0]
        banned = torch.tensor(bundle.banned_token_ids)
        return log_distribution(bundle.lm_head(states[len(ids) - 1 : -1]), banned=banned)


def test_old_turns_are_chosen_anew_for_every_response(lm) -> None:
    trajectories = played(
        lm, window="all", leave_out=LeaveOut(turns=0.5), visual=False, max_turns=6
    )
    longest = max(trajectories, key=lambda trajectory: len(trajectory.turns))
    assert [len(turn.turns_left_out) for turn in longest.turns][:5] == [0, 0, 1, 1, 2]
    whole = played(lm, window="all", leave_out=None, visual=False, max_turns=6)
    assert sum(
        map(len, (t.prompt_ids for trajectory in trajectories for t in trajectory.turns))
    ) < sum(map(len, (t.prompt_ids for trajectory in whole for t in trajectory.turns)))
    assert mismatch(lm, trajectories) < 5e-5


def test_turns_with_other_images_are_not_joined(vlm) -> None:
    (trajectory,) = played(vlm, window="all", leave_out=LeaveOut(patches=0.5), groups=1)
    assert len(split_into_samples(trajectory, 0)) == 1
    first, second = trajectory.turns[:2]
    second.prompt_images = [np.zeros_like(first.prompt_images[0]), *second.prompt_images[1:]]
    assert len(split_into_samples(trajectory, 0)) > 1
    (trajectory,) = played(vlm, window="all", leave_out=LeaveOut(patches=0.5), groups=1)
    patches = trajectory.turns[1].prompt_patches
    trajectory.turns[1].prompt_patches = [patches[0][::-1], *patches[1:]]
    assert len(split_into_samples(trajectory, 0)) > 1


def test_truncated_episode_bootstraps_from_a_whole_last_image(vlm) -> None:
    trajectories = played(
        vlm, window="all", leave_out=LeaveOut(patches=0.5), max_turns=3, turn_limit_bootstraps=True
    )
    batch = collate(trajectories, vlm)
    assert batch.final is not None
    shown = batch.final.patches.sum(-1)
    slots = (batch.final.input_ids == vlm.image_token_id).sum(1)
    assert shown.sum(1).tolist() == slots.tolist()
    assert shown[0, -1] == 2 * shown[0, 0]


@pytest.mark.parametrize("wrong", [{"patches": 1.0}, {"turns": -0.1}])
def test_shares_out_of_range_raise(wrong) -> None:
    with pytest.raises(ValueError, match="LeaveOut"):
        LeaveOut(**wrong)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3_vl"])
def test_families_whose_images_are_whole_are_refused(name) -> None:
    with pytest.raises(ValueError, match=rf"context\.leave_out: in {name.removesuffix('_vl')}"):
        ContextManager(tiny(name), window="all", leave_out=LeaveOut(patches=0.5))
