"""Requests that are refused: a program goes on after some, and is ended after many in a row."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image
from support.episodes.rollout_fixtures import lively
from support.models.tiny_models import TEXT, VISION
from support.runs.composing import composed

from ragen_pl.base.prompt_formats import PromptFormat
from ragen_pl.config import ConfigError
from ragen_pl.environments.check import check_environment
from ragen_pl.models.build import build_small_vlm
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.trajectory import EpisodeStatus

FOREVER = "\nwhile True: {}"
TOO_LONG = "ask('long ' * 20000)"


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (TOO_LONG, "context_length_exceeded"),
        ("ask('a', n=2)", "unsupported_value"),
        ("post('/chat/completions', [])", "invalid_json"),
        ("ask('a', {'Content-Encoding': 'gzip'})", "invalid_request"),
        ("post('/chat/completions', {'model': 'other'})", "model_not_found"),
        ("post('/embeddings', {'input': 'a'})", "unknown_url"),
        ("post('/rewards', {'id': 'a', 'reward': 1})", "invalid_api_key"),
        ("post('/rewards', {'id': 'a'}, key=os.environ['RAGEN_REWARD_KEY'])", "invalid_request"),
        ("post('/chat/completions', {}, key=os.environ['RAGEN_REWARD_KEY'])", "invalid_api_key"),
    ],
)
@pytest.mark.parametrize("first", ["ask('a')", ""], ids=["after an answer", "from the start"])
def test_a_program_that_sends_refused_requests_for_ever_is_ended(play, script, call, code, first):
    # the time limit would end the test later than its own
    (episode,) = play(script(first + FOREVER.format(call)), program_s=3600.0, post_rewards=True)
    assert episode.status is EpisodeStatus.FAILED
    assert "its last 100 requests were refused" in episode.error and code in episode.error
    assert len(episode.turns) == bool(first)
    if first:
        assert "env.kwargs.crash_reward=-1 trains on such episodes" in episode.error


def test_such_an_episode_gets_the_reward_of_a_crash(play, script):
    (episode,) = play(
        script("ask('a')" + FOREVER.format(TOO_LONG)), program_s=3600.0, crash_reward=-1.0
    )
    assert episode.status is EpisodeStatus.TERMINATED
    (turn,) = episode.turns
    assert turn.reward_terms["environment/crash"] == -1.0


def test_refused_requests_between_answers_are_no_such_row(play, script):
    body = """
for turn in range(4):
    for _ in range(99):
        assert ask('a', n=2)['status'] == 400
    ask(f'turn {turn}')
report(reward=1.0)
"""
    (episode,) = play(script(body), program_s=3600.0)
    assert episode.status is EpisodeStatus.TERMINATED and len(episode.turns) == 4
    assert episode.turns[-1].info["program"]["requests"]["refused_unsupported_value"] == 396


@pytest.fixture(scope="module")
def native_vlm() -> ModelBundle:
    bundle = lively(
        build_small_vlm(seed=0, vision=VISION, text=TEXT, prompt_format=PromptFormat.NATIVE)
    )
    bundle.calls_tools = True
    # a processor that gives the model images as they are
    bundle.processor.image_processor.max_cells = None
    return bundle


def shows(height: int, width: int) -> str:
    file = io.BytesIO()
    Image.fromarray(np.zeros((height, width, 3), np.uint8)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "see"}]
    return f"ask([{{'role': 'user', 'content': {parts!r}}}])"


@pytest.mark.parametrize(("height", "width"), [(16, 16 * 40), (16 * 40, 32)])
def test_an_image_that_the_model_does_not_take_is_refused(play, script, native_vlm, height, width):
    body = f"""
refused = {shows(height, width)}
assert refused['status'] == 400 and refused['error']['code'] == 'unsupported_image', refused
assert '{height} x {width}' in refused['error']['message'], refused
assert 'choices' in {shows(32, 32)}
assert 'choices' in ask('words')
report(reward=1.0)
"""
    (episode,) = play(script(body), bundle=native_vlm)
    assert episode.error is None
    assert episode.status is EpisodeStatus.TERMINATED and len(episode.turns) == 2


def test_the_line_of_a_failed_episode_shows_the_end_of_the_output(play, script, caplog):
    """The reason stands there, below a traceback of any length."""
    body = """
ask('a')
for number in range(40):
    print(f'line {number} ' + 'x' * 200, file=sys.stderr)
raise ValueError('the shop is closed')
"""
    play(script(body))
    (line,) = [one.message for one in caplog.records if "episodes failed" in one.message]
    assert "the program failed: exit code 1" in line
    assert line.endswith("ValueError: the shop is closed") and len(line) < 600


@pytest.mark.parametrize("noise", ["print('x' * 5000)", "for n in range(40): print(n, 'x' * 200)"])
def test_so_does_that_of_the_check_before_training(script, noise):
    command = script(f"{noise}\nraise ValueError('the shop is closed')")
    overrides = ("env=program", f"env.command={json.dumps(command)}")
    with pytest.raises(ConfigError) as caught:
        check_environment(composed(*overrides, checked=False))
    line = str(caught.value)
    assert "ended without a request: exit code 1" in line and "\n" not in line
    assert line.endswith("ValueError: the shop is closed") and len(line) < 900


def test_a_hint_for_programs_is_refused_before_training(script):
    command = script('ask("a")\nreport(reward=1)')
    hint = "{_target_:ragen_pl.prompts.hint.Hint,template:'{observation} be brief'}"
    overrides = (
        "env=program",
        f"env.command={json.dumps(command)}",
        f"++algorithm.loss.kl.hint={hint}",
    )
    with pytest.raises(
        ConfigError, match=r"request has no place for a hint; set algorithm\.loss\.kl\.hint=null"
    ):
        check_environment(composed(*overrides, checked=False))
