"""SVG from a picture: rewards, untrusted SVG, and what trivial answers earn."""

from __future__ import annotations

import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from visual_envs.svg import COLORS, Svg
from visual_envs.svg_images import SvgError, color_match, read_svg, render

FULL = '<rect width="4" height="4" fill="{}"/>'


@pytest.fixture
def env() -> Svg:
    return Svg()


def same(left: dict, right: dict) -> bool:
    return left["text"] == right["text"] and all(
        np.array_equal(*pair) for pair in zip(left["images"], right["images"], strict=True)
    )


def test_seeds_repeat_and_differ(env):
    keys = set()
    for seed in range(40):
        first, _ = env.reset(seed=seed)
        keys.add(env.state_key())
        env.step(FULL.format("red"))
        assert same(first, env.reset(seed=seed)[0])
        assert first in env.observation_space
    assert len(keys) >= 39


def test_a_pickled_environment_goes_on_in_the_same_way(env):
    env.reset(seed=1)
    copy = pickle.loads(pickle.dumps(env))
    answer = env.random_action(np.random.default_rng(0))
    assert same(env.step(answer)[0], copy.step(answer)[0])


@pytest.mark.parametrize("settings", [{}, {"size": 8, "min_shapes": 8, "max_shapes": 8}])
def test_optimal_answers_solve_every_picture(settings):
    env, rng = Svg(**settings), np.random.default_rng(0)
    for seed in range(100):
        env.reset(seed=seed)
        assert env.describe().count(",") + 1 == env.difficulty()
        _, reward, terminated, _, info = env.step(env.optimal_action(rng))
        assert terminated and info["success"] and info["action_is_valid"]
        assert reward == pytest.approx(1.0) and info["reward_parts"]["solved"] == 0.5
        with pytest.raises(RuntimeError, match="has ended"):
            env.step("")


def test_one_wrong_shape_of_eight_is_no_success():
    env, rng = Svg(size=5, min_shapes=8, max_shapes=8), np.random.default_rng(0)
    for seed in range(30):
        env.reset(seed=seed)
        shapes = env.optimal_action(rng).replace("/><", "/>\n<").split("\n")
        color = shapes[0].split('fill="')[1].split('"')[0]
        other = COLORS[(COLORS.index(color) + 1) % len(COLORS)]
        x, y = (env.describe().split(",")[0].split()[place] for place in (2, 3))
        circle = f'<circle cx="{x}.5" cy="{y}.5" r=".5" fill="{color}"/>'
        square = f'<rect x="{x}" y="{y}" width="1" height="1" fill="{color}"/>'
        kind = square if "circle" in shapes[0] else circle
        for wrong in ("", shapes[0].replace(color, other), kind):
            info = env.step(wrong + "".join(shapes[1:]))[4]
            assert info["action_is_valid"] and not info["success"]


def test_rewards_of_an_episode_sum_to_the_similarity_of_its_last_picture():
    # no random picture is the right one
    env, rng = Svg(min_shapes=3), np.random.default_rng(100)
    for seed in range(30):
        observation, _ = env.reset(seed=seed)
        answers = [env.random_action(rng) for _ in range(4)] + ["<line/>"]
        steps = [env.step(answer) for answer in answers]
        assert sum(step[1] for step in steps) == pytest.approx(0.0)
        assert steps[-1][0]["text"] == "match 0" and same(steps[-1][0], observation)


@pytest.mark.parametrize("color", [*COLORS, "gray", "white", "black", "#eeeeee"])
def test_a_page_of_one_colour_earns_nothing(color):
    env = Svg(min_shapes=7, max_shapes=7)
    for seed in range(20):
        env.reset(seed=seed)
        assert env.step(FULL.format(color))[1] == 0


def test_a_random_picture_earns_little(env):
    rng, rewards = np.random.default_rng(0), []
    for seed in range(200):
        env.reset(seed=seed)
        rewards.append(env.step(env.random_action(rng))[1])
    assert np.mean(rewards) < 0.05


def test_an_answer_that_is_refused_leaves_the_picture(env):
    env.reset(seed=3)
    env.step(env.random_action(np.random.default_rng(1)))
    key = env.state_key()
    observation, reward, terminated, _, info = env.step("<text>hello</text>")
    assert (
        not info["action_is_valid"] and not info["action_is_effective"] and "text" in info["error"]
    )
    assert reward == 0 and not terminated and env.state_key() == key
    assert observation in env.observation_space


@pytest.mark.parametrize(
    "text",
    [
        '<svg><image href="file:///etc/passwd"/></svg>',
        '<svg xmlns:xlink="http://www.w3.org/1999/xlink"><use xlink:href="#a"/></svg>',
        '<rect width="1" height="1" fill="url(#a)"/>',
        '<rect style="fill:red" width="1" height="1"/>',
        '<rect width="1e9" height="1"/>',
        '<rect width="999999" height="1"/>',
        '<rect width="inf" height="nan"/>',
        '<rect width="٣" height="1"/>',
        '<svg viewBox="0 0 4 9"></svg>',
        '<svg viewBox="0 0 0 0"></svg>',
        '<svg onload="x()"></svg>',
        "<script>1</script>",
        "<style>*{}</style>",
        '<g transform="scale(9)"/>',
        "<g><![CDATA[x]]></g>",
        "<!-- x --><g/>",
        '<!DOCTYPE a [<!ENTITY b "c">]><svg>&b;</svg>',
        "<?xml version='1.0'?><svg/>",
        "<g>" * 7 + "</g>" * 7,
        "<g/>" * 65,
        "<rect>",
        "</svg><svg>",
        "red square",
        "<rect><rect/></rect>",
        '<path d="M 0 0 L 1e5 1"/>',
        '<path d="M 0 0 X"/>',
        "\ud800",
        "<g>\x00</g>",
    ],
)
def test_refused_svg(text):
    with pytest.raises(SvgError):
        read_svg(text, size=4)


@pytest.mark.parametrize(
    "text",
    [
        '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="640" viewBox="0 0 64 64">'
        '<rect x="16" y="16" width="16" height="16" fill="#f00"/></svg>',
        '<g fill="red"><rect x="1" y="1" width="1" height="1"/></g>',
        '<polygon points="1,1 2,1 2,2 1,2" fill="red"/>',
        '<path d="M1 1H2V2H1Z" fill="red"/>',
        '  <line x1="1" y1="1.5" x2="2" y2="1.5" stroke="red" stroke-width="1"/>\n',
    ],
)
def test_the_same_picture_in_other_words(text):
    plain = read_svg('<rect x="1" y="1" width="1" height="1" fill="red"/>', size=4)
    other = render(read_svg(text, size=4), side=64)
    assert np.array_equal(other, render(plain, side=64))
    assert color_match(other, render(plain, side=64)) == 1


@given(st.lists(st.text("MmLlHhVvCcSsQqTtAaZz0123456789.,+- ", max_size=100), max_size=20))
def test_any_path_is_refused_or_drawn(paths):
    try:
        drawing = read_svg("".join(f'<path d="{path}"/>' for path in paths), size=4)
        picture = render(drawing, side=64)
    except SvgError:
        return
    assert picture.shape == (64, 64, 3)


@pytest.mark.parametrize(
    "text",
    [
        '<svg viewBox="0 0 0.01 0.01"><circle cx="99999" cy="0" r="99999"/></svg>',
        '<svg viewBox="-99999 0 4 4"><rect width="1" height="1"/></svg>',
        '<circle cx="2000" cy="1" r="1"/>',
        '<line x1="0" y1="1" x2="9" y2="1" stroke="red" stroke-width="1000"/>',
        '<polygon points="0,0 1,-2000 1,1"/>',
        '<path d="M0 0 L1 2000"/>',
        f'<path d="m0 0 {"9 9 " * 120}"/>',
        '<path d="M0 0 A 800 800 0 1 1 1 1"/>',
        f'<path d="M0 0 Q 40 40 1 1 T {"40 -40 " * 20}"/>',
    ],
)
def test_what_reaches_far_beyond_the_canvas_is_refused(text):
    # the renderer may end the process at it
    drawing = read_svg(text, size=4)
    with pytest.raises(SvgError, match="beyond the canvas"):
        render(drawing, side=64)


def test_a_picture_may_reach_beyond_the_canvas():
    far = '<circle cx="400" cy="1" r="400"/><path d="M-400 9 l 20 20 c 1 1 2 2 3 3 A 9 9 0 0 1 400 400"/>'
    assert render(read_svg(far, size=4), side=64).min() == 0


def test_rendered_pictures_take_little_memory():
    tracemalloc.start()
    for number in range(30):
        render(read_svg(f'<circle cx="1.{number:02}" cy="1" r="1"/>', size=4), side=1024)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 80 * 2**20
    # small ones as many as before
    small = render(read_svg('<circle r="1"/>', size=4), side=64)
    assert render(read_svg('<circle r="1"/>', size=4), side=64) is small


def test_settings_are_checked(env):
    with pytest.raises(ValueError, match="max_shapes=7"):
        Svg(size=3, max_shapes=7)
    with pytest.raises(ValueError, match="size: found 9"):
        Svg(size=9)
    with pytest.raises(ValueError, match="min_shapes=9"):
        env.reset(seed=0, options={"min_shapes": 9})
    env.reset(seed=0, options={"min_shapes": 5})
    assert env.difficulty() == 5


def test_without_the_library_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "resvg_py", None)
    with pytest.raises(ImportError, match=r"pip install 'ragen_pl\[svg\]'"):
        Svg()


def test_the_rules_tell_the_number_of_shapes_of_the_episode():
    env = Svg()
    env.reset(seed=0, options={"min_shapes": 4, "max_shapes": 5})
    assert "shows 4 to 5 shapes" in env.instructions
    env.reset(seed=0)
    assert "shows 1 to 3 shapes" in env.instructions
