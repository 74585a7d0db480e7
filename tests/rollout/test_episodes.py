"""Episodes: rewards of turns, how episodes end, faulty environments, seeds."""

import gymnasium
import numpy as np
import pytest

from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.responders import EngineResponder
from ragen_pl.trajectory import EpisodeStatus, Span

MORE = "<think>go</think><answer>More</answer>"
COUNTER = "test/Counter-v0"


def specs(count: int, *, members: int = 1) -> list[EpisodeSpec]:
    return [
        EpisodeSpec(group=n // members, member=n % members, seed=n // members) for n in range(count)
    ]


# ---- rewards of turns


def test_rewards_actions_and_success_of_an_episode(play):
    (episode,), _ = play(
        COUNTER, specs(1), lambda slot, turn: MORE, kwargs={"goal": 2}, max_turns=5
    )
    assert [turn.reward for turn in episode.turns] == [0.0, 1.0]
    assert (episode.status, episode.success, episode.reward) == (
        EpisodeStatus.TERMINATED,
        True,
        1.0,
    )
    assert [turn.actions for turn in episode.turns] == [["More"], ["More"]]
    assert [turn.think for turn in episode.turns] == ["go", "go"]
    assert episode.difficulty == 2 and episode.final_prompt_ids is None and episode.error is None


def test_several_actions_of_a_response_are_carried_out_until_the_environment_ends(play):
    def write(slot, turn):
        return "<think></think><answer>Stay || More || More || More</answer>"

    (episode,), _ = play(
        COUNTER, specs(1), write, kwargs={"goal": 2}, max_turns=5, max_actions_per_turn=4
    )
    (turn,) = episode.turns
    assert (turn.actions, turn.reward) == (["Stay", "More", "More"], 1.0)
    (episode,), _ = play(
        COUNTER, specs(1), write, kwargs={"goal": 2}, max_turns=2, max_actions_per_turn=2
    )
    assert [turn.actions for turn in episode.turns] == [["Stay", "More"]] * 2


def test_invalid_response_costs_the_format_penalty_and_ends_the_episode(play):
    (episode,), _ = play(COUNTER, specs(1), lambda slot, turn: "More", format_penalty=0.25)
    (turn,) = episode.turns
    assert (turn.reward, turn.actions, turn.action_is_valid) == (-0.25, [], False)
    assert (episode.status, episode.success) == (EpisodeStatus.TERMINATED, False)
    assert episode.final_prompt_ids is None


def test_invalid_response_can_leave_the_state_unchanged(play):
    def write(slot, turn):
        return "what?" if turn == 0 else MORE

    (episode,), _ = play(
        COUNTER, specs(1), write, kwargs={"goal": 1}, invalid_ends=False, format_penalty=0.25
    )
    assert [turn.reward for turn in episode.turns] == [-0.25, 1.0]
    assert [turn.observation.text for turn in episode.turns] == ["count 0 of 1"] * 2
    assert episode.success


def test_response_at_its_length_limit_is_no_answer(play, lm):
    limit = len(ContextManager(lm).encode_response(MORE)) - 1  # without its end
    (episode,), _ = play(
        COUNTER,
        specs(1),
        lambda slot, turn: (MORE, False),
        invalid_ends=True,
        response_tokens=limit,
    )
    (turn,) = episode.turns
    assert turn.hit_length_limit and not turn.action_is_valid and turn.reward == -0.05
    assert Span.END not in turn.spans


def test_spans_and_end_token_of_a_complete_response(play, lm):
    (episode,), _ = play(COUNTER, specs(1), lambda slot, turn: MORE, max_turns=1)
    (turn,) = episode.turns
    words = [lm.piece(int(token)) for token in turn.response_ids]
    assert "".join(words[:-1]) == turn.response_text == MORE
    spans = {Span(span): "" for span in turn.spans}
    for word, span in zip(words, turn.spans, strict=True):
        spans[Span(span)] += word
    assert spans[Span.THINK] == "go" and spans[Span.ACTION] == "More"
    assert spans[Span.END] == "<|end|>" and turn.spans[-1] == Span.END


def test_state_description_is_of_the_state_before_the_turn(play):
    (episode,), _ = play(COUNTER, specs(1), lambda slot, turn: MORE, max_turns=3)
    assert [turn.state_description for turn in episode.turns] == ["count 0", "count 1", "count 2"]
    assert [turn.info["count"] for turn in episode.turns] == [1, 2, 3]


def test_states_are_recorded_before_each_turn_and_after_the_last(play):
    (episode,), _ = play(
        COUNTER, specs(1), lambda slot, turn: MORE, max_turns=3, record_states=True
    )
    keys = [*(turn.state_key for turn in episode.turns), episode.final_state_key]
    assert [key.rpartition(" ")[2] for key in keys] == ["0", "1", "2", "3"]


# ---- how an episode ends


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ({"max_turns": 2}, EpisodeStatus.TURN_LIMIT),
        ({"max_turns": 2, "turn_limit_bootstraps": True}, EpisodeStatus.TRUNCATED),
        ({"max_turns": 9, "kwargs": {"limit": 2}}, EpisodeStatus.TRUNCATED),
        ({"max_turns": 2, "kwargs": {"limit": 2}}, EpisodeStatus.TRUNCATED),
        (
            {"max_turns": 2, "kwargs": {"goal": 2}, "turn_limit_bootstraps": True},
            EpisodeStatus.TERMINATED,
        ),
    ],
)
def test_termination_is_not_truncation(play, settings, status):
    (episode,), engine = play(COUNTER, specs(1), lambda slot, turn: MORE, **settings)
    assert episode.status is status and len(episode.turns) == 2
    assert (episode.final_prompt_ids is not None) == (status is EpisodeStatus.TRUNCATED)
    if status is EpisodeStatus.TRUNCATED:
        last = episode.turns[-1]
        known = np.concatenate([last.prompt_ids, last.response_ids])
        assert (episode.final_prompt_ids[: len(known)] == known).all()
        shown = engine.context.bundle.tokenizer.decode(episode.final_prompt_ids)
        assert shown.endswith("count 2 of 100<|assistant|>")


@pytest.mark.parametrize("limit", range(118, 134))
def test_conversation_without_room_for_a_response_is_truncated(play, limit):
    (episode,), _ = play(
        COUNTER,
        specs(1),
        lambda slot, turn: MORE,
        max_tokens=limit,
        response_tokens=30,
        max_turns=50,
    )
    assert episode.status is EpisodeStatus.TRUNCATED and 1 < len(episode.turns) < 50
    assert all(len(turn.prompt_ids) + 30 <= limit for turn in episode.turns)
    assert len(episode.final_prompt_ids) + 30 > limit


def test_first_prompt_without_room_raises(play):
    with pytest.raises(ValueError, match=r"context\.max_tokens=20; raise it"):
        play(COUNTER, specs(1), lambda slot, turn: MORE, max_tokens=20, response_tokens=30)


# ---- order of responses


def test_trajectories_do_not_depend_on_the_order_in_which_responses_finish(play):
    def write(slot, turn):
        more = "More" if (slot + turn) % 3 else "Stay"
        return f"<think>{slot}</think><answer>{more}</answer>"

    settings = {"kwargs": {"goal": 3}, "max_turns": 5, "window": "all"}
    together, _ = play(COUNTER, specs(5), write, **settings)
    apart, _ = play(COUNTER, specs(5), write, shuffled=True, **settings)
    for episode, other in zip(together, apart, strict=True):
        assert (episode.seed, episode.status, episode.reward) == (
            other.seed,
            other.status,
            other.reward,
        )
        assert [t.prompt_ids.tolist() for t in episode.turns] == [
            t.prompt_ids.tolist() for t in other.turns
        ]
        assert [t.response_text for t in episode.turns] == [t.response_text for t in other.turns]


def test_an_episode_goes_on_while_the_environment_of_another_steps(play):
    gate = gymnasium.make(COUNTER).unwrapped.gate
    gate.clear()

    def write(slot, turn):
        # its responses come after the first one of the other episode
        if (slot, turn) == (0, 2):
            gate.set()
        return MORE

    environment = {"kwargs": {"goal": 3, "faults": {1: "step waits"}}, "timeout_s": 5.0}
    episodes, _ = play(COUNTER, specs(2), write, shuffled=True, workers=2, **environment)
    assert [episode.success for episode in episodes] == [True, True]


@pytest.mark.parametrize("workers", [1, 3])
def test_the_number_of_workers_changes_no_trajectory(play, workers):
    def write(slot, turn):
        return f"<think>{slot}</think><answer>{'More' if (slot + turn) % 3 else 'Stay'}</answer>"

    settings = {"kwargs": {"goal": 3}, "max_turns": 5}
    expected, _ = play(COUNTER, specs(7), write, timeout_s=None, **settings)
    episodes, engine = play(COUNTER, specs(7), write, workers=workers, **settings)
    assert [episode.reward for episode in episodes] == [episode.reward for episode in expected]
    # what is sampled together is the same
    sizes = [len(requests) for requests in engine.requests]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 7


# ---- faulty environments


FAULTS = {
    0: "reset raises",
    2: "step raises",
    3: "number",
    5: "nan reward",
    6: "flat image",
    7: "float image",
    8: "step exits",
}


@pytest.mark.parametrize("timeout_s", [None, 20.0])
def test_faulty_environment_fails_its_own_trajectory_only(play, timeout_s):
    environment = {"kwargs": {"goal": 2, "faults": FAULTS}, "timeout_s": timeout_s}
    episodes, _ = play(COUNTER, specs(10), lambda slot, turn: MORE, **environment)
    failed = {episode.seed for episode in episodes if episode.status is EpisodeStatus.FAILED}
    assert failed == set(FAULTS)
    sound, _ = play(COUNTER, specs(10), lambda slot, turn: MORE, kwargs={"goal": 2})
    for seed in set(range(10)) - failed:
        assert episodes[seed].success and episodes[seed].error is None
        assert [t.response_ids.tolist() for t in episodes[seed].turns] == [
            t.response_ids.tolist() for t in sound[seed].turns
        ]
    errors = [episodes[seed].error for seed in sorted(FAULTS)]
    assert errors[:3] == [
        "RuntimeError: broken in reset",
        "RuntimeError: broken in step",
        "TypeError: test/Counter-v0 returned an observation of type int; expected a str, or a "
        "dict with 'text' (str) and 'image' (uint8 [height, width, 3]) or 'images' (a list of these, "
        "empty in a turn without an image)",
    ]
    assert "reward nan" in errors[3] and "(64, 64, 5)" in errors[4] and "float64" in errors[5]
    assert episodes[0].turns == [] and len(episodes[2].turns) == 1


@pytest.mark.parametrize("fault", ["reset hangs", "step hangs"])
def test_hanging_environment_fails_its_own_trajectory_only(play, fault):
    episodes, _ = play(
        COUNTER, specs(3), lambda slot, turn: MORE,
        kwargs={"goal": 1, "faults": {1: fault}}, timeout_s=3.0,
    )  # fmt: skip
    assert [episode.success for episode in episodes] == [True, False, True]
    assert episodes[1].status is EpisodeStatus.FAILED
    assert episodes[1].error == "TimeLimitExceeded: the environment took longer than 3 s"


def test_an_interrupted_rollout_gives_its_environments_back(play):
    """All but those whose step is under way, which are closed."""
    counter = type(gymnasium.make(COUNTER).unwrapped)
    made = []

    class Recorded(counter):
        def __init__(self):
            super().__init__(goal=2, faults={1: "step waits"})
            made.append(self)
            self.is_closed = False

        def close(self):
            self.is_closed = True

    gymnasium.register(id="test/Recorded-v0", entry_point=Recorded)
    _, engine = play(
        "test/Recorded-v0", [], lambda slot, turn: MORE, shuffled=True, workers=2, timeout_s=60.0
    )

    def rollout(specs, **settings):
        responder = EngineResponder(engine=engine, context=engine.context)
        return engine.proxy.rollout(responder, specs, seed_key=(0, "test"), **settings)

    def interrupt(episode):
        raise KeyboardInterrupt

    counter.gate.clear()
    with pytest.raises(KeyboardInterrupt):
        rollout(specs(2), on_turn=interrupt)
    counter.gate.set()
    engine.pending.clear()
    engine.release()
    others = [EpisodeSpec(group=n, member=0, seed=5 + n) for n in range(2)]
    assert [episode.success for episode in rollout(others)] == [True, True]
    # both of the first rollout are made at once, so in any order
    closed = sorted((env.fault, env.is_closed) for env in made)
    assert closed == [("", False), ("", False), ("step waits", True)]


def test_environment_that_failed_in_reset_is_not_used_again():
    manager = EnvironmentManager(target=COUNTER, kwargs={"faults": {1: "reset raises"}})
    first = manager.open(specs(3))
    manager.close(first)
    second = manager.open([EpisodeSpec(group=0, member=0, seed=seed) for seed in (5, 6, 7)])
    used = [slot.env for slot in second]
    assert first[1].env not in used and first[0].env in used and first[2].env in used


def test_environment_that_failed_in_a_step_is_not_used_again(play):
    environment = {"goal": 1, "faults": {1: "step raises"}}
    _, engine = play(COUNTER, specs(3), lambda slot, turn: MORE, kwargs=environment)
    slots = engine.proxy.environments.open(specs(3))
    assert sorted(slot.env.unwrapped.resets for slot in slots) == [1, 2, 2]


def test_image_array_that_is_overwritten_does_not_change_earlier_turns(play, vlm):
    (episode,), _ = play(
        "test/Film-v0", specs(1), lambda slot, turn: "<think></think><answer>On</answer>",
        bundle=vlm, max_turns=3,
    )  # fmt: skip
    assert [int(turn.observation.images[0].max()) for turn in episode.turns] == [0, 10, 20]
    assert [int(image.max()) for image in episode.turns[2].prompt_images] == [0, 10, 20]


# ---- seeds


def test_held_out_states_are_never_drawn_and_members_share_their_initial_state(play):
    # six of the eight initial states
    held_out = {f"environment {environment} count 0" for environment in range(6)}
    group_of = specs(120, members=3)
    manager = EnvironmentManager(target=COUNTER, kwargs={"environments": 8}, held_out=held_out)
    slots = manager.open(group_of)
    keys = [slot.env.unwrapped.state_key() for slot in slots]
    assert all(slot.error is None for slot in slots) and not held_out & set(keys)
    assert all(len(set(keys[n : n + 3])) == 1 for n in range(0, 120, 3))
    assert len(set(keys)) == 2
    free = EnvironmentManager(target=COUNTER, kwargs={"environments": 8}).open(
        [EpisodeSpec(group=0, member=0, seed=7)]
    )
    # an initial state that is not held out is kept
    assert free[0].env.unwrapped.state_key() == "environment 7 count 0"


def test_environment_without_free_initial_states_raises():
    manager = EnvironmentManager(
        target=COUNTER, kwargs={"environments": 1}, held_out={"environment 0 count 0"}
    )
    (slot,) = manager.open(specs(1))
    assert "too small for its validation set" in slot.error


def test_blank_images_are_gray_and_of_the_same_size():
    target = "ragen/FrozenLakeVisual-v0"
    (seen,) = EnvironmentManager(target=target).open(specs(1))
    (blank,) = EnvironmentManager(target=target, blank_images=True).open(specs(1))
    (seen_image,), (blank_image,) = seen.observation.images, blank.observation.images
    assert (blank_image == 128).all() and not (seen_image == 128).all()
    assert blank_image.shape == seen_image.shape == (64, 64, 3)


def test_unknown_environment_raises():
    with pytest.raises(ValueError, match=r"names no environment(.|\n)*class path"):
        EnvironmentManager(target="envs.nowhere.Nothing")
