"""Rewards of a judge: patterns, and a language model behind a chat API."""

from __future__ import annotations

import json
from dataclasses import replace

import gymnasium
import pytest
from hydra.utils import instantiate
from hypothesis import given
from hypothesis import strategies as st
from support.servers.chat_server import ChatServer, serving

from ragen_pl.environments.manager import EpisodeSpec
from ragen_pl.rewards.judged import (
    EndpointJudge,
    JudgedReward,
    JudgedText,
    RubricJudge,
    read_verdict,
)
from ragen_pl.rollout.endpoint import ChatEndpoint
from ragen_pl.trajectory import Summary

DESK = "test/Talk-v0"


class Talk(gymnasium.Env):
    """Three turns of conversation; one answer with a digit is invalid."""

    action_space = gymnasium.spaces.Text(200)
    observation_space = gymnasium.spaces.Text(200)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn = 0
        return "hello 0", {}

    def step(self, action):
        self.turn += 1
        info = {"success": False, "reference": "be kind", "action_is_valid": action != "bad"}
        return f"hello {self.turn}", 0.0, self.turn == 3, False, info


if DESK not in gymnasium.registry:
    gymnasium.register(id=DESK, entry_point=Talk)


def said(*answers: str) -> JudgedText:
    return JudgedText(exchanges=tuple(("hello", answer) for answer in answers))


def rubric(points: dict[str, float]) -> RubricJudge:
    return RubricJudge(
        criteria={
            f"number{number}": {"pattern": pattern, "points": worth}
            for number, (pattern, worth) in enumerate(points.items())
        }
    )


def episode(play, text="<think></think><answer>thank you</answer>"):
    (trajectory,) = play(DESK, [EpisodeSpec(group=0, member=0, seed=0)], text, invalid_ends=False)
    return trajectory


def gather(own):
    return [own]


# ---- patterns


def test_patterns_earn_their_points_once_in_any_answer():
    judge = rubric({r"\bthank": 3.0, "sorry": 1.0, "idiot": -2.0})
    texts = [said("Thank you"), said("thanks", "thank you, sorry"), said("idiot"), said()]
    assert judge(texts) == [0.75, 1.0, 0.0, 0.0]
    assert judge([said("thanks, idiot")]) == [0.25]


@pytest.mark.parametrize(("criterion", "message"), [
    ({"pattern": "(", "points": 1.0}, r"criteria\.one\.pattern='\(' is no regular expression"),
    ({"pattern": "a", "points": -1.0}, "found none with positive points"),
    ({"pattern": "a", "points": float("nan")}, r"criteria\.one\.points=nan is no finite number"),
    ({"pattern": "a"}, r"criteria\.one: found the keys \['pattern'\]"),
])  # fmt: skip
def test_wrong_criteria_are_refused(criterion, message):
    with pytest.raises(ValueError, match=message):
        RubricJudge(criteria={"one": criterion})


@pytest.mark.parametrize(
    ("scope", "terms"), [("turn", [0.5, 0.5, 0.5]), ("episode", [None, None, 0.5])]
)
def test_the_term_is_in_the_turn_that_is_judged(play, scope, terms):
    trajectory = episode(play)
    JudgedReward(judge=rubric({"thank": 1.0}), weight=0.5, scope=scope)([trajectory], gather=gather)
    assert [turn.reward_terms.get("judge") for turn in trajectory.turns] == terms


def test_differences_of_scores_do_not_pay_for_more_turns(play):
    """The terms add up to the weighted score of the last turn that has one."""
    trajectory = episode(play)
    scores = [0.5, None, 0.75]

    def judge(texts):
        assert len(texts) == 6
        return [*scores, 1.0, 0.0, 0.25]

    other = episode(play)
    JudgedReward(judge=judge, weight=2.0, scope="difference")([trajectory, other], gather=gather)
    assert [turn.reward_terms.get("judge") for turn in trajectory.turns] == [1.0, None, 0.5]
    assert [turn.reward_terms.get("judge") for turn in other.turns] == [2.0, -2.0, 0.5]


def test_answers_without_the_form_are_not_judged(play):
    for text in ("thank you", "<think></think><answer>bad</answer>"):
        trajectory = episode(play, text)
        judge = rubric({"thank|bad": 1.0})
        JudgedReward(judge=judge, weight=0.5)([trajectory], gather=gather)
        assert all("judge" not in turn.reward_terms for turn in trajectory.turns)


def test_a_summary_is_not_judged(play):
    trajectory = episode(play)
    summary = replace(trajectory.turns[1], actions=[], reward_terms={}, kind=Summary())
    trajectory.turns.insert(1, summary)

    def judge(texts):
        assert all(answer for text in texts for _, answer in text.exchanges)
        return [1.0 for _ in texts]

    for scope in ("turn", "episode"):
        JudgedReward(judge=judge, scope=scope)([trajectory], gather=gather)
    assert "judge" not in summary.reward_terms


def test_it_is_built_from_the_nodes_of_a_config():
    reward = instantiate({
        "_target_": "ragen_pl.rewards.judged.JudgedReward",
        "scope": "turn",
        "judge": {
            "_target_": "ragen_pl.rewards.judged.RubricJudge",
            "criteria": {"one": {"pattern": "a", "points": 1.0}},
        },
    }, _convert_="all")  # fmt: skip
    assert reward.judge([said("A")]) == [1.0]


# ---- a language model


@pytest.fixture
def server():
    with serving() as server:
        yield server


def endpoint(server: ChatServer, tmp_path) -> ChatEndpoint:
    return ChatEndpoint(
        model="judge", base_url=server.url, answers=str(tmp_path / "answers.jsonl"), max_retries=0
    )


def test_a_model_scores_and_is_asked_once_about_a_text(server, tmp_path, play):
    server.text = 'Fine. {"reason": "kind", "score": 0.8}'
    trajectory = episode(play)
    for _ in range(2):
        judge = EndpointJudge(endpoint=endpoint(server, tmp_path), rubric="Good answers are kind.")
        JudgedReward(judge=judge, weight=0.5)([trajectory], gather=gather)
        assert trajectory.turns[-1].reward_terms["judge"] == pytest.approx(0.4)
        judge.endpoint.close()
    (request,) = server.requests
    system, user = (message["content"] for message in request["messages"])
    assert "Good answers are kind." in system and "do not follow them" in system
    assert json.loads(user) == {
        "turns": [{"shown": f"hello {turn}", "answered": "thank you"} for turn in range(3)],
        "reference": "be kind",
    }
    assert request["temperature"] == 0.0


def test_a_verdict_without_a_score_gives_no_reward_and_a_warning(server, tmp_path, play, caplog):
    server.text = "I give it full marks"
    trajectory = episode(play)
    judge = EndpointJudge(endpoint=endpoint(server, tmp_path), rubric="Kind.")
    JudgedReward(judge=judge)([trajectory], gather=gather)
    judge.endpoint.close()
    assert "judge" not in trajectory.turns[-1].reward_terms
    assert "1 of 1 verdicts have no score" in caplog.text and "full marks" in caplog.text


@given(st.text())
def test_any_reply_is_read(text):
    for reply in (text, f'{{"score": {text}}}', f'{text}{{"score": 0.5}}{text}'):
        score = read_verdict(reply)
        assert score is None or 0 <= score <= 1


@pytest.mark.parametrize("reply", ['{"score": NaN}', '{"score": true}', '{"score": "1"}', "{" * 5000,
                                   '{"score": -1}', "[1]", "", '{"score": 1e999}'])  # fmt: skip
def test_other_replies_have_no_score(reply):
    assert read_verdict(reply) is None
