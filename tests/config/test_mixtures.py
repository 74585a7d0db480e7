"""Configurations of several environments: their settings, and what is refused before a model is built."""

from pathlib import Path

import gymnasium
import pytest
from gymnasium import spaces

from ragen_pl.assembly.component_checks import check_components
from ragen_pl.config import ConfigError, check_config
from ragen_pl.config.composition import compose_overrides
from ragen_pl.config.environments import environment_configs
from ragen_pl.config.trust import check_settings
from ragen_pl.environments.calls import make_environment
from ragen_pl.environments.check import check_environments
from ragen_pl.run.checks import check_validation_batches

TWO = "{frozenlake: 2, bandit: {share: 1, max_turns: 3, rewards: {weights: {format: 0.5}}}}"


def mixture_of(environments=TWO, *overrides):
    return compose_overrides("fit", ["env=mixture", f"env.environments={environments}", *overrides])


def test_environments_have_the_settings_of_their_files_and_own_changes():
    cfg = mixture_of()
    check_config(cfg)
    lake, bandit = environment_configs(cfg).values()
    alone = compose_overrides("fit", ["env=frozenlake"])
    for key in ("kwargs", "max_turns", "prompt_format", "target"):
        assert lake.env[key] == alone.env[key]
    assert lake.curriculum == alone.curriculum and bandit.curriculum is None
    assert lake.warm_start.demonstrator == alone.warm_start.demonstrator
    assert lake.rollout.max_response_tokens == 40 and bandit.rollout.max_response_tokens == 32
    assert cfg.rollout.max_response_tokens == 40
    assert (bandit.env.max_turns, bandit.algorithm.rewards.weights.format) == (3, 0.5)
    assert lake.algorithm.rewards.weights.format == 1.0
    assert not bandit.validation.held_out and lake.validation.held_out
    shares = {name: one.share for name, one in cfg.env.environments.items()}
    assert shares == {"frozenlake": 2, "bandit": 1}


def test_two_environments_may_have_one_file():
    cfg = mixture_of("{small: {file: frozenlake, kwargs: {size: 3}}, large: {file: frozenlake}}")
    check_config(cfg)
    sizes = {name: one.env.kwargs.size for name, one in environment_configs(cfg).items()}
    assert sizes == {"small": 3, "large": 4}


def test_a_configuration_of_one_environment_is_its_own():
    cfg = compose_overrides("fit", ["env=bandit"])
    assert environment_configs(cfg) == {"bandit": cfg}


@pytest.mark.parametrize(
    ("environments", "message"),
    [
        ("{}", r"env.environments"),
        ("{frozenlak: 1}", r"env.environments.frozenlak.file=frozenlak: .*did you mean frozenlake"),
        ("{bandit: many}", r"env.environments.bandit=many: expected a share"),
        ("{custom: 1}", r"env.environments.custom.target has no value; set 'env"),
        ("{mixture: 1}", r"env.environments.mixture.file=mixture"),
    ],
)
def test_an_environment_that_is_none_is_refused(environments, message):
    with pytest.raises(ConfigError, match=message):
        check_config(mixture_of(environments))


SHARE = "{frozenlake: 1, bandit: %s}"


@pytest.mark.parametrize(
    ("environments", "overrides", "message"),
    [
        (SHARE % "{share: -1}", "", r"env.environments.bandit.share=-1: expected"),
        ("{frozenlake: 0, bandit: 0}", "", "every share is 0"),
        (SHARE % "{max_turn: 3}", "", "unknown key env.environments.bandit.max_turn; did you mean"),
        (SHARE % "{group_size: 3}", "", "unknown key env.environments.bandit.group_size"),
        (SHARE % "{kwargs: {nams: train}}", "", "unknown key env.environments.bandit.kwargs.nams"),
        ("{reward: {file: bandit}}", "", "env.environments.reward: metrics and folders are named"),
        ("{program: 1}", "", "env.environments.program: is an agent program"),
        ("{frozenlake_visual: 1, bandit: 1}", "", "frozenlake_visual.visual=true: all environments"),
        (SHARE % "{prompt_format: native}", "", "bandit.prompt_format=native: with env.prompt_format"),
        (TWO, "+env.max_turns=3", "env.max_turns: is not read in a mixture"),
        (TWO, "warm_start=records warm_start.records.path=.", "warm_start=records: initial states"),
        (TWO, "validation.blank=true", "validation.blank=true: is not measured"),
        (TWO, "context.window=3 context.leave_out.turns=0.5", "context.leave_out: does not work"),
        (
            TWO,
            "+curriculum._target_=ragen_pl.data.curriculum.Curriculum +curriculum.stages=[{},{}] "
            "+curriculum.above=0.5 +curriculum.fraction=0.5",
            "curriculum: is not read in a mixture",
        ),
        (TWO, "algorithm=grpo", "aggregation=seq-mean-token-mean: divides by the weights"),
        (TWO, "algorithm=starpo_s", "algorithm.filter: TopFraction .* different scales"),
        ("{tic_tac_toe: 1, bandit: 1}", "", "env.environments: tic_tac_toe has seats=2, bandit has seats=1; give"),
        ("{tic_tac_toe: {share: 1, kwargs: {opponent: random}}, bandit: 1}", "", None),
        (TWO, "algorithm=trico", None),
        (TWO, "algorithm=grpo algorithm.loss.policy.aggregation=token-mean", None),
    ],
)  # fmt: skip
def test_what_does_not_work_in_a_mixture_is_refused(environments, overrides, message):
    cfg = mixture_of(environments, *overrides.split())

    def check():
        check_config(cfg)
        check_components(cfg, check_environments(cfg))

    if message is None:
        check()
    else:
        with pytest.raises(ConfigError, match=message):
            check()


class Silent(gymnasium.Env):
    """Never says whether its task is solved."""

    action_names, instructions = ("Go",), "Go."
    action_space, observation_space = spaces.Discrete(1), spaces.Text(9)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "go", {}

    def step(self, action):
        return "went", 1.0, True, False, {}


def test_a_fraction_of_a_validation_is_that_of_each_environment():
    own = "{frozenlake: 1, bandit: {validation: {episodes: 4}}}"
    cfg = mixture_of(
        own, "validation.episodes=256", "rollout.num_envs=4", "trainer.limit_val_batches=0.5"
    )
    message = r"limit_val_batches=0.5: .* has 1 \(env.environments.bandit.validation.episodes=4,"
    with pytest.raises(ConfigError, match=message):
        check_validation_batches(cfg)
    cfg.env.environments.bandit.validation.episodes = 8
    check_validation_batches(cfg)


def test_an_environment_that_does_not_report_success_is_refused():
    cfg = mixture_of(f"{{silent: {{file: custom, target: {__name__}.Silent}}, bandit: 1}}")
    with pytest.raises(ConfigError, match=r"sets info\['success'\], by which the environments"):
        check_environments(cfg)


def test_other_commands_ask_for_one_of_the_environments():
    with pytest.raises(ConfigError, match="this command plays one environment; set env=frozenlake"):
        make_environment(mixture_of().env)


@pytest.mark.parametrize("target", ["somebody.module.Env", "module:own/Env-v0", "own/Env-v0"])
def test_an_environment_in_somebody_elses_file_is_not_taken_at_its_word(target):
    own = {"target": target, "kwargs": {}}
    settings = {"env": {"name": "mixture", "environments": {"lake": own}}}
    with pytest.raises(ConfigError, match=r"env.environments.lake.target=.* names code"):
        check_settings(settings, file=Path("config.yaml"), given=None)
    own["target"] = "ragen_pl.envs:ragen/FrozenLake-v0"
    check_settings(settings, file=Path("config.yaml"), given=None)
