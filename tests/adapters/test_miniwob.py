"""Web pages of MiniWoB in a real browser."""

from __future__ import annotations

import json

import numpy as np
import pytest

from envs.tools import call_text
from visual_envs.adapters.miniwob import MiniWoB
from visual_envs.adapters.miniwob_policies import POLICIES

pytestmark = pytest.mark.environments


@pytest.fixture(scope="module")
def browser():
    env = MiniWoB(plans=True)
    yield env
    env.close()


@pytest.fixture
def env(browser):
    browser.tasks = tuple(POLICIES)
    return browser


def play(env, *, seed, rng):
    """Return what an episode of random calls shows and earns."""
    seen = [env.reset(seed=seed)]
    for _ in range(4):
        seen.append(env.step(env.random_action(rng)))
        if seen[-1][2]:
            break
    return seen


@pytest.mark.parametrize("task", POLICIES)
def test_the_scripted_player_does_the_task(env, task):
    env.tasks, rng = (task,), np.random.default_rng(0)
    for seed in range(10):
        observation, info = env.reset(seed=seed)
        assert info["task"] == task and observation in env.observation_space
        for _ in range(8):
            assert len(env.describe()) < 200 and "\n" not in env.describe()
            call = json.loads(env.optimal_action(rng))
            last = env.plan().split(": ", 1)[1].split(", ")[-1]
            assert last.startswith(f"{call['arguments']['element']} ")
            observation, reward, terminated, _, info = env.step(env.optimal_action(rng))
            assert info["action_is_valid"] and info["action_is_effective"]
            if terminated:
                break
            assert reward == 0
        assert info["success"] and reward == 1 and info["reward_parts"] == {"task": 1.0}
        assert observation in env.observation_space


def test_seeds_repeat_with_their_pictures_and_differ(env):
    keys = set()
    for seed in range(8):
        first = play(env, seed=seed, rng=np.random.default_rng(50 + seed))
        again = play(env, seed=seed, rng=np.random.default_rng(50 + seed))
        assert len(first) == len(again)
        for one, other in zip(first, again, strict=True):
            assert one[0]["text"] == other[0]["text"] and one[1:] == other[1:]
            assert np.array_equal(one[0]["image"], other[0]["image"])
            assert one[0]["image"].std() > 0
        env.reset(seed=seed)
        keys.add(env.state_key())
    assert len(keys) == 8


@pytest.mark.parametrize(
    "task", ["login-user", "click-checkboxes", "form-sequence-2", "enter-date"]
)
def test_clicking_the_button_at_once_earns_nothing(env, task):
    env.tasks = (task,)
    rewards = []
    for seed in range(10):
        env.reset(seed=seed)
        button = env.page.find("button").number
        rewards.append(env.step(call_text("click", element=button))[1])
    # "Select nothing" is a task
    assert sum(rewards) <= 2


def test_slow_answers_lose_nothing(env):
    env.tasks = ("click-button",)
    env.reset(seed=0)
    driver = env.browser.instance.driver
    assert driver.execute_script("return core.EPISODE_MAX_TIME") == 1e9


def test_wrong_calls_are_told_and_leave_the_page(env):
    env.tasks = ("login-user",)
    env.reset(seed=1)
    key, button = env.state_key(), env.page.find("button").number
    for call, message in (
        (call_text("click", element=99), "there is no element 99"),
        (call_text("click", element=0), "there is no element 0"),
        (call_text("type", element=button, text="x"), "is no field"),
        (call_text("type", element=button - 1, text="\u0000"), "cannot be typed"),
        (call_text("select", element=button, option="x"), "no such option"),
    ):
        observation, reward, terminated, _, info = env.step(call)
        assert observation["text"].startswith(f"error: {observation['text'][7:]}")
        assert message in observation["text"] and "Enter the username" in observation["text"]
        assert info["action_is_valid"] and not info["action_is_effective"]
        assert reward == 0 and not terminated and env.state_key() == key


def test_unknown_task_is_refused():
    with pytest.raises(ValueError, match=r"tasks: found \['fly'\]"):
        MiniWoB(tasks=["fly"])


def test_without_a_browser_the_remedy_is_named(monkeypatch):
    monkeypatch.delenv("MINIWOB_CHROME_BINARY", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ImportError, match="chromium"):
        MiniWoB()


def test_a_page_without_its_scripts_is_loaded_again(env, monkeypatch):
    driver = env.browser.instance.driver
    expected, _ = env.reset(seed=3)
    get, loads = driver.get, []

    def sometimes(url):
        loads.append(url)
        get("data:text/html,<p>half a page</p>" if len(loads) < 3 else url)

    monkeypatch.setattr(driver, "get", sometimes)
    observation, _ = env.reset(seed=3)
    assert len(loads) == 3 and observation["text"] == expected["text"]
    monkeypatch.setattr(driver, "get", lambda url: get("data:text/html,<p>half a page</p>"))
    with pytest.raises(RuntimeError, match="does not load its scripts"):
        env.reset(seed=3)
    monkeypatch.undo()
    env.reset(seed=3)
