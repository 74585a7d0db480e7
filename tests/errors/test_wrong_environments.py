"""Environments that break the protocol, each refused in one line."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from support.runs.composing import composed

from ragen_pl.base.machine import only_new_garbage, resident_memory, used_memory
from ragen_pl.config import ConfigError, config_dir
from ragen_pl.environments.check import check_environment
from ragen_pl.run.baselines import warn_of_garbage

HERE = Path(__file__).parent
OF_THE_ENVIRONMENT = [
    ("NoEnvironment", "found a NoEnvironment, expected a gymnasium.Env"),
    ("NumberForText", "returned an observation of type int; expected a str, or a dict"),
    ("NoNames", r"found action_names=\(\), expected a name for each of 2 actions"),
    ("SameNames", "expected names that differ; case does not count"),
    ("NameWithBars", r"expected none of \|\|, <, > in them"),
    ("FourTuple", r"step returned \(str, float, bool, dict\), expected \(observation, reward"),
    ("NaNReward", "returned reward nan; expected a finite number"),
    ("FloatImage", r"type float64; expected uint8 \[height, width, 3\]"),
    ("ResetRaises", r"reset\(seed=0, options=None\) raised: KeyError: 'door'"),
    ("ResetBare", r"reset returned a str, expected \(observation, info\)"),
    ("NoSeed", "unexpected keyword argument 'seed'"),
    (
        "Unseeded",
        "with seed 0 and equal actions differ in text after 0 steps; draw from self.np_random",
    ),
    ("Continuous", r"found action_space=Box.*, expected Discrete\(n\) .* or Text\(max_length\)"),
    ("NumberForFreeText", "chose action 3, expected a text"),
    ("Black", "each of its .* images has one colour only"),
    ("OnePicture", "images are equal; check its renderer"),
    ("Growing", "each observation contains the one before it .* or set context.window=1"),
    ("MoreThanDeclared", r"returned reward 1, outside of its reward_range=\(0, 0.5\)"),
    (
        "RemembersEpisodes",
        "two episodes with seed 0 and equal actions differ in text after 1 steps",
    ),
    (
        "EndsEarlierAgain",
        "two episodes with seed 0 and equal actions differ in length after 4 steps",
    ),
    (
        "DrawnWhenMade",
        "two instances with seed 0 and equal actions differ in text after 0 steps; draw nothing in the constructor",
    ),
    ("StepRaises", r"step\(1\) raised: the floor gave way"),
    ("Unhelpful", "env.kwargs of broken_environments.Unhelpful: no display"),
    ("ExitsInConstructor", r"its constructor: its code ended the program \(SystemExit: 3\)"),
    ("SecondResetRaises", r"reset\(seed=0, options=None\) raised: no third episode"),
    ("NumberNames", r"found action_names=\(1, 2\), expected texts; quote each name"),
    ("StartsAtOne", r"Discrete\(2, start=1\), expected one that starts at 0.* set Discrete\(2\)"),
    ("WordForSuccess", r"returned info\['success'\]='no'; expected true or false"),
    ("WordForReward", "returned reward '1.0'; expected a finite number"),
    ("NumberDescribed", r"describe\(\) returned a value of type int, expected str"),
    ("NeedsLibrary", "it needs the package 'no_such_library', which is not installed"),
]


@pytest.fixture(scope="module")
def custom():
    """The configuration of `env=custom`, composed once."""
    return composed("env=custom", "env.target=set", "logger=none", checked=False)


WITH_IMAGES = ("Black", "OnePicture")


def checked(custom, monkeypatch, root, environment, **settings):
    """Check an environment; it has to be refused or pass without a line break."""
    monkeypatch.syspath_prepend(str(HERE))
    custom = OmegaConf.merge(custom, {"env": {"target": f"broken_environments.{environment}"}})
    custom.paths.root, custom.context.window = str(root), "all"
    custom.env.visual = environment in WITH_IMAGES
    for key, value in settings.items():
        OmegaConf.update(custom, key.replace("__", "."), value)
    check_environment(custom)


@pytest.mark.parametrize(
    ("environment", "message"), OF_THE_ENVIRONMENT, ids=[name for name, _ in OF_THE_ENVIRONMENT]
)
def test_an_environment_that_breaks_the_protocol_is_refused(
    custom, monkeypatch, tmp_path, environment, message
):
    with pytest.raises(ConfigError, match=message) as error:
        checked(custom, monkeypatch, tmp_path, environment)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("environment", "call", "process"),
    [
        ("HangsInConstructor", "its constructor", False),
        ("HangsInConstructor", "its constructor", True),
        ("HangsInReset", "reset(seed=0, options=None)", False),
        ("HangsInStep", "step(1)", False),
        ("HangsInStep", "step(1)", True),
    ],
)
def test_an_environment_that_hangs_is_refused(
    custom, monkeypatch, tmp_path, environment, call, process
):
    # the creation may take ten times as long
    timeout_s = 0.3 if call == "its constructor" else 5.0
    settings = {"env__timeout_s": timeout_s, "env__process": process}
    with pytest.raises(ConfigError) as error:
        checked(custom, monkeypatch, tmp_path, environment, **settings)
    limit = 10 * timeout_s if call == "its constructor" else timeout_s
    assert str(error.value) == (
        f"env.target=broken_environments.{environment}: {call}: the environment took longer than {limit:g} s; "
        f"find out what it waits for, or raise env.timeout_s={timeout_s:g}"
    )


def test_a_state_key_that_holds_nothing_out_is_refused(custom, monkeypatch, tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"with seed 0 .* differ in state_key\(\) after 0 steps; .* build state_key\(\) from",
    ):
        checked(custom, monkeypatch, tmp_path, "KeyOfTheObject", validation__held_out=True)
    checked(custom, monkeypatch, tmp_path, "KeyOfTheObject", validation__held_out=False)


def test_an_environment_that_keeps_memory_is_reported(custom, monkeypatch, tmp_path, caplog):
    checked(custom, monkeypatch, tmp_path, "Sound")
    assert "MiB of memory" not in caplog.text
    checked(custom, monkeypatch, tmp_path, "Hoards")
    assert re.search(r"Hoards: each episode keeps about [78] MiB of memory; free it", caplog.text)


def test_objects_of_imports_stay_out_of_collections_after_a_check():
    gc.freeze()
    before = gc.get_freeze_count()
    with only_new_garbage():
        gc.collect()
    assert gc.get_freeze_count() > before // 2


def test_pages_of_files_are_no_memory_in_use(tmp_path):
    """The system takes them back at any time, which would hide what an environment keeps."""
    file = tmp_path / "file"
    file.write_bytes(bytes(2**24))
    before, resident = used_memory(), resident_memory()
    if before is None:
        pytest.skip("the system does not tell")
    array = np.memmap(file, mode="r")
    assert array.sum() == 0
    assert resident_memory() - resident > 2**23 > used_memory() - before


def test_an_environment_that_says_no_success_is_reported(custom, monkeypatch, tmp_path, caplog):
    checked(custom, monkeypatch, tmp_path, "Sound")
    assert "success" not in caplog.text
    checked(custom, monkeypatch, tmp_path, "SaysNoSuccess")
    assert (
        "SaysNoSuccess: no step of its random episodes sets info['success'], so success is 0 everywhere; best.ckpt, "
        "the curriculum and sweeps go by the return"
    ) in caplog.text


def test_garbage_that_earns_more_than_play_is_reported(custom, monkeypatch, tmp_path, caplog):
    checked(custom, monkeypatch, tmp_path, "Sound")
    enough = {"env__format_penalty": 1.1, "env__invalid_ends": False}
    checked(custom, monkeypatch, tmp_path, "EveryStepCosts", **enough)
    assert "without a valid action" not in caplog.text
    checked(custom, monkeypatch, tmp_path, "EveryStepCosts")
    assert (
        "EveryStepCosts: responses without a valid action earn -0.05 an episode, more than the -10 of random play; an "
        "agent may learn to answer nothing; set env.format_penalty=11"
    ) in caplog.text
    # the name that the summary has from the file
    baselines = OmegaConf.load(config_dir() / "validation" / "baselines" / "random.yaml")
    (garbage,) = (f"{name} policy" for name in baselines if name != "random")
    warn_of_garbage(-0.05, {garbage: {"return": -0.05}})
    assert "val/return=-0.05: no more than the -0.05 of responses" in caplog.text
    assert "context.system_prompt=instructions" in caplog.text
    assert "env.format_penalty, or" not in caplog.text
    both = {garbage: {"return": -0.05}, "random policy": {"return": -0.2}}
    warn_of_garbage(-0.1, both)
    assert "random play earns less: raise env.format_penalty, or" in caplog.text


@pytest.mark.parametrize(
    ("environment", "process"), [("Sound", False), ("FreeText", False), ("FreeText", True)]
)
def test_a_sound_environment_passes(custom, monkeypatch, tmp_path, environment, process):
    checked(custom, monkeypatch, tmp_path, environment, env__process=process)


def test_an_environment_that_fails_later_on_is_reported(fit):
    line = fit("env=custom", "env.target=broken_environments.ThirdResetRaises").refused()
    assert line == (
        "every demonstration failed; the first with ConnectionError: the simulator has gone"
    )


def test_failed_episodes_are_shown_in_lines_table_and_warnings(fit, tmp_path):
    done = fit(
        "env=custom", "env.target=broken_environments.SomeSeedsBreak", "logger=none", "trainer.max_epochs=2",
        "callbacks.trajectories=null", "callbacks.plots=null", "warm_start.steps=2", "warm_start.episodes=16",
        "rollout.groups=16", "validation.episodes=16", "paths.run_dir=run", "rollout.failures.min_fraction=0.0",
        quick=False,
    )  # fmt: skip
    assert done.code == 0, done.stderr
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    failed, ended = metrics["val/failed_episodes"], metrics["val/episodes"]
    assert 0 < failed < 16 and failed + ended == 16 and metrics["val/failed"] == failed / 16
    # an invalid answer costs 0.05; failed episodes have no return
    assert metrics["random_policy/return"] == metrics["random_policy/success"] == 1.0
    (last,) = (line for line in done.stdout.splitlines() if line.startswith("iteration 2/2"))
    assert re.search(rf"  failed \d of 16  validation failed {failed:.0f} of 16", last)
    rows = [line for line in done.stdout.splitlines() if line.startswith("│")]
    # before, after, random and garbage
    assert sum(f"{failed:.0f} of 16" in row for row in rows) == 4 == len(rows)
    heads = [line.partition("  ")[0] for line in done.stdout.splitlines()]
    assert heads.count("validation before the first iteration") == 1
    assert heads.index("validation before the first iteration") < heads.index("iteration 1/2")
    # once in each of demonstrations, training, validation set
    assert 1 <= done.stdout.count("ConnectionError: no simulator for seed") <= 3


def test_a_run_ends_where_too_many_episodes_fail(fit):
    line = fit(
        "env=custom", "env.target=broken_environments.SomeSeedsBreak", "rollout.failures.min_fraction=1.0",
        "rollout.groups=16", "validation.episodes=16",
    ).refused()  # fmt: skip
    assert re.match(
        r"iteration 1: (\d+) of 16 episodes failed and drop \1 groups; 0.\d+ of the iteration can be trained on, less "
        r"than rollout.failures.min_fraction=1, after it was played twice; most failed with "
        r"ConnectionError: no simulator for seed \d+",
        line,
    )


def test_an_environment_is_not_served_to_everybody(command, monkeypatch):
    monkeypatch.delenv("RAGEN_PL_ENVIRONMENT_KEY", raising=False)
    line = command("serve_environment", "env=frozenlake", "server.host=0.0.0.0").refused()
    assert line.startswith("server.host=0.0.0.0: ") and "set RAGEN_PL_ENVIRONMENT_KEY" in line
    assert "server.sessions=0" in command("serve_environment", "server.sessions=0").refused()


def test_scripted_policies_that_an_environment_does_not_support_are_refused(fit):
    sound = ("env=custom", "env.target=broken_environments.Sound")
    line = fit(*sound, "warm_start/demonstrator=noisy").refused()
    assert line.startswith("warm_start.demonstrator: ") and "no blind_action" in line
    remedy = line.partition("play at random: ")[2].split()
    check_environment(composed(*sound, "warm_start/demonstrator=noisy", *remedy))
    line = fit(
        *sound, "+validation.baselines.optimal._target_=envs.policies.OptimalPolicy"
    ).refused()
    assert line.startswith("validation.baselines.optimal: ") and "optimal_action" in line
    assert "validation.held_out=false" in fit(*sound, "validation.held_out=true").refused()


def test_a_demonstrator_of_several_actions_needs_turns_that_take_them():
    demonstrator = "warm_start.demonstrator"
    cfg = composed(
        "env=frozenlake", "env.max_actions_per_turn=3", f"~{demonstrator}.noise", f"~{demonstrator}.base",
        f"{demonstrator}._target_=ragen_pl.envs.policies.SeveralActions", f"+{demonstrator}.most=3",
        f"+{demonstrator}.policy._target_=ragen_pl.envs.policies.OptimalPolicy",
    )  # fmt: skip
    check_environment(cfg)
    cfg.env.max_actions_per_turn = 1
    with pytest.raises(ConfigError, match=r"chose [23] actions, .* env.max_actions_per_turn=1"):
        check_environment(cfg)
