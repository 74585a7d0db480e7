"""Histories that a summary of the policy replaces."""

from __future__ import annotations

import pytest
import torch
from support.episodes.rollout_fixtures import TextEngine
from support.episodes.trajectories import responses

from ragen_pl.algorithms.advantages.graphgpo import goal_distances
from ragen_pl.data.collate import collate
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.compaction import Compaction
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.responders import EngineResponder
from ragen_pl.trajectory import EpisodeStatus, Span

ACTION = "<think>so</think><answer>More</answer>"
COMPACTION = Compaction(max_summary_tokens=16, request="Sum up.")


def played(bundle, *, engine=None, write=None, max_tokens=150, episodes=1, num_envs=64, **settings):
    """Play the counting environment to 8 with a context that holds a few turns."""
    context = ContextManager(
        bundle,
        window="all",
        system_prompt="Count.",
        max_tokens=max_tokens,
        **({"compaction": COMPACTION} | settings),
    )
    manager = EnvironmentManager(
        target="support.episodes.rollout_fixtures.Counter",
        kwargs={"goal": 8},
        max_turns=12,
        invalid_ends=False,
        record_states=True,
    )
    proxy = AgentProxy(
        environments=manager, context=context, max_response_tokens=40, num_envs=num_envs
    )
    made = engine or TextEngine(context, write or (lambda *_: ACTION))
    specs = [EpisodeSpec(group=n, member=0, seed=n) for n in range(episodes)]
    responder = EngineResponder(engine=made, context=context)
    return proxy.rollout(responder, specs, seed_key=(0, "test"))


def test_an_episode_that_exceeds_its_context_goes_on_after_a_summary(lm):
    (cut,) = played(lm, compaction=None)
    assert cut.status is EpisodeStatus.TRUNCATED
    (whole,) = played(lm)
    assert whole.status is EpisodeStatus.TERMINATED and whole.success
    summaries = [turn for turn in whole.turns if not turn.is_task_step]
    assert summaries and len(whole.turns) - len(summaries) == 8
    for turn in whole.turns:
        assert len(turn.prompt_ids) + len(turn.response_ids) <= 150


def test_the_new_conversation_has_task_summary_and_latest_observation(lm):
    (episode,) = played(lm)
    place = next(number for number, turn in enumerate(episode.turns) if not turn.is_task_step)
    summary, following = episode.turns[place : place + 2]
    assert summary.observation.text == f"count {place} of 8\nSum up."
    assert (
        following.observation.text
        == f"count 0 of 8\nYour notes: <answer>More</answer>\ncount {place} of 8"
    )
    assert summary.reward_terms == {} and summary.actions == []
    assert summary.spans[-1] == Span.END and Span.THINK in summary.spans


def test_a_summary_is_written_in_the_state_of_the_next_turn(lm):
    (episode,) = played(lm)
    keys = [turn.state_key for turn in episode.turns]
    assert None not in keys and len(set(keys)) == 8
    # it is no step on the way to the goal
    episodes = collate([episode], lm).episodes
    solved, turns = torch.tensor([True]), episodes.turns
    distance = goal_distances(episodes.state, episodes.final_state, solved, episodes.group, turns)
    rest = [sum(turn.is_task_step for turn in episode.turns[k + 1 :]) for k in range(int(turns))]
    assert distance.tolist() == [rest]


def test_samples_are_conversations_and_rewards_are_conserved(lm):
    (episode,) = played(lm)
    batch = collate([episode], lm)
    summaries = sum(not turn.is_task_step for turn in episode.turns)
    assert len(batch.samples) == 1 + summaries
    assert float(batch.episodes.turn_rewards.sum()) == pytest.approx(episode.reward)
    trained = int((batch.samples.turn >= 0).sum())
    assert trained == sum(len(turn.response_ids) for turn in episode.turns)
    advances = [turn.is_task_step for turn in episode.turns]
    assert batch.episodes.advances[0, : len(advances)].tolist() == advances


def test_a_summary_may_be_empty_or_cut(lm):
    for summary in ("", ("x" * 16, False)):
        write = lambda session, turn, text=summary: ACTION  # noqa: E731
        (episode,) = played(lm, write=write)
        assert episode.success
    # a response without reasoning and answer
    (episode,) = played(lm, write=lambda session, turn: ACTION if turn < 2 else "")
    assert episode.status in (EpisodeStatus.TURN_LIMIT, EpisodeStatus.TRUNCATED)


def test_trajectories_do_not_depend_on_the_number_of_environments(lm):
    """The engine's cache is rebuilt where a conversation begins anew."""
    plays = [
        played(
            lm,
            engine=TransformersEngine(PolicyModule(lm)),
            episodes=4,
            num_envs=num_envs,
            max_tokens=150,
        )
        for num_envs in (1, 4)
    ]
    assert any(not turn.is_task_step for one in plays[0] for turn in one.turns)
    assert responses(plays[0]) == responses(plays[1])


def test_a_summary_has_a_seed_of_its_own(lm):
    seeds = []

    class Noting(TextEngine):
        def submit(self, requests, *, keep):
            seeds.extend(request.seed for request in requests)
            super().submit(requests, keep=keep)

    context = ContextManager(lm, window="all", system_prompt="Count.")
    (episode,) = played(lm, engine=Noting(context, lambda *_: ACTION))
    assert len(seeds) == len(set(seeds)) == len(episode.turns)


def test_a_context_that_holds_no_two_turns_warns(lm, caplog):
    played(lm, max_tokens=110)
    assert "full again after one turn; raise it" in caplog.text


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"compaction": {"template": "{task}"}}, r"expected \['observation', 'summary', 'task'\]"),
        ({"compaction": {"max_summary_tokens": 0}}, "max_summary_tokens"),
    ],
)
def test_bad_settings_name_the_key(lm, settings, found):
    with pytest.raises((ValueError, TypeError), match=found):
        played(lm, **settings)


def test_a_window_and_compaction_exclude_each_other(lm):
    with pytest.raises(ValueError, match=r"context\.compaction with context.window=2"):
        ContextManager(lm, window=2, compaction=COMPACTION)
