"""Several environments in one run: what each group plays, by which settings, from which seeds."""

from collections import Counter

import pytest
from support.episodes.small_lakes import FAR, Module
from support.episodes.trajectories import make_trajectory, make_turn

import envs  # noqa: F401 - registers the environments
from ragen_pl.base.seeding import derive_seed
from ragen_pl.data import datamodule
from ragen_pl.data.curriculum import Curriculum
from ragen_pl.data.datamodule import RolloutDataModule
from ragen_pl.data.mixture import MixedEnvironment, Mixture
from ragen_pl.data.settings import IterationSettings
from ragen_pl.data.task_sampling import SamplingRule, TaskSampling
from ragen_pl.data.validation import ValidationSet
from ragen_pl.engines.errors import RolloutError
from ragen_pl.environments.manager import EnvironmentManager
from ragen_pl.environments.mixture import EnvironmentMixture
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rewards.shaping import WeightTerms
from ragen_pl.rollout.proxy import AgentProxy

LAKE = {
    "target": "ragen/FrozenLake-v0",
    "kwargs": {"size": 3, "hole_fraction": 0.1},
    "max_turns": 3,
    "invalid_ends": False,
}
BANDIT = {
    "target": "ragen/Bandit-v0",
    "max_turns": 1,
    "rules": "Pull one arm.",
    "max_response_tokens": 4,
    "format_penalty": 0.5,
}


def managers():
    return {"lake": EnvironmentManager(**LAKE), "bandit": EnvironmentManager(**BANDIT)}


def mixture(lake=1.0, bandit=1.0, **own):
    return Mixture(
        {
            "lake": MixedEnvironment(share=lake, **own),
            "bandit": MixedEnvironment(share=bandit, rewards=[WeightTerms(format=3.0)]),
        }
    )


def data_of(lm, mixed, *, groups=6, **settings):
    proxy = AgentProxy(
        environments=EnvironmentMixture(managers()),
        context=ContextManager(lm),
        max_response_tokens=6,
    )
    iteration = IterationSettings(groups=groups, group_size=2)
    return RolloutDataModule(proxy, iteration=iteration, mixture=mixed, **settings)


def test_each_environment_is_played_by_its_own_settings(lm):
    data = data_of(lm, mixture(lake=2.0))
    played = data.collect(0, Module(lm))
    names = [one.environment for one in played]
    assert names == [name for name in ("lake", "bandit", "lake") * 2 for _ in range(2)]
    lakes = [one for one in played if one.environment == "lake"]
    bandits = [one for one in played if one.environment == "bandit"]
    # an untrained model answers nothing valid, which ends an episode of the bandit alone, and costs 0.5 times 3 there
    assert {len(one.turns) for one in lakes} == {3} and {len(one.turns) for one in bandits} == {1}
    assert {len(turn.response_ids) for one in bandits for turn in one.turns} == {4}
    assert {len(turn.response_ids) for one in lakes for turn in one.turns} == {6}
    assert {one.reward for one in bandits} == {-1.5}
    assert [round(one.reward, 6) for one in lakes] == [-0.15] * len(lakes)
    decode = lm.tokenizer.decode
    assert all("Pull one arm." in decode(one.turns[0].prompt_ids) for one in bandits)
    assert not any("Pull one arm." in decode(one.turns[0].prompt_ids) for one in lakes)


def test_metrics_are_by_environment_and_returns_are_not_averaged(lm):
    data = data_of(lm, mixture(lake=2.0))
    data.collect(0, Module(lm))
    metrics = data.metrics
    assert (metrics["lake/episodes"], metrics["bandit/episodes"], metrics["episodes"]) == (8, 4, 12)
    assert metrics["bandit/return"] == pytest.approx(-1.5)
    assert metrics["lake/return"] == pytest.approx(-0.15)
    assert not {"return", "return_std", "group_return_std"} & set(metrics)


def test_samples_know_their_environment_and_its_share(lm):
    data = data_of(lm, mixture(lake=2.0))
    data.collect(0, Module(lm))
    batch = data.buffer
    assert batch.shares == {"lake": pytest.approx(2 / 3), "bandit": pytest.approx(1 / 3)}
    groups = batch.episodes.group.tolist()
    assert batch.episodes.environment.tolist() == [[0, 1, 0][group % 3] for group in groups]


def specs(lm, mixed, *, iterations, groups=6):
    data = data_of(lm, mixed, groups=groups)
    return [one for number in range(iterations) for one in data.episode_specs(number)]


def test_seeds_of_an_environment_do_not_depend_on_the_others(lm):
    def seeds(mixed):
        all_of_them = specs(lm, mixed, iterations=3)
        return list(dict.fromkeys(one.seed for one in all_of_them if one.environment == "lake"))

    few, many = seeds(mixture(bandit=3.0)), seeds(mixture(bandit=0.0))
    assert len(few) == 5 and len(many) == 18
    assert many[: len(few)] == few


def test_ranks_divide_the_episodes_of_one(lm, monkeypatch):
    whole = specs(lm, mixture(lake=2.0), iterations=2)
    parts = []
    for rank in range(2):
        monkeypatch.setattr(datamodule, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(datamodule, "world_size", lambda: 2)
        parts += specs(lm, mixture(lake=2.0), iterations=2)
    key = str
    assert sorted(map(key, parts)) == sorted(map(key, whole))


def test_a_share_of_0_is_never_played(lm):
    assert {one.environment for one in specs(lm, mixture(bandit=0.0), iterations=5)} == {"lake"}


def test_a_further_rollout_plays_the_same_environments_from_other_seeds(lm):
    data = data_of(lm, mixture(lake=2.0))
    first, second = data.episode_specs(1), data.episode_specs(1, attempt=1)
    assert [one.environment for one in first] == [one.environment for one in second]
    assert not {one.seed for one in first} & {one.seed for one in second}


def test_a_curriculum_goes_by_the_episodes_of_its_environment():
    def make():
        return mixture(curriculum=Curriculum(stages=FAR, above=0.5, fraction=0.5, window=1))

    mixed, place = make(), {"groups": 4, "seed": 0}
    assert mixed.metrics(0) == {"lake/curriculum_stage": 0.0}
    # groups 0 and 2 are of the lake; a solved bandit is no success in it
    played = [
        make_trajectory(
            make_turn(actions=["Up"], success=group % 2 == 1),
            group=group,
            success=group % 2 == 1,
            environment=("lake", "bandit")[group % 2],
        )
        for group in range(4)
    ]
    mixed.observe_played(played, iteration=0, **place)
    assert mixed.metrics(1) == {"lake/curriculum_stage": 0.0}
    for one in played:
        one.success = one.environment == "lake"
    mixed.observe_played(played, iteration=1, **place)
    assert mixed.metrics(2) == {"lake/curriculum_stage": 1.0}
    # half of its own groups play the new stage
    options = [mixed.options_for(group, iteration=2, **place) for group in range(4)]
    assert options == [FAR[1], None, None, None]
    resumed = make()
    resumed.load_state_dict(mixed.state_dict())
    assert resumed.metrics(2) == mixed.metrics(2)


def test_both_seats_of_a_game_count_for_the_curriculum_of_its_environment():
    mixed = mixture(curriculum=Curriculum(stages=FAR, above=0.5, fraction=0.5, window=1))
    # games 0 and 2 are of the lake
    played = [
        make_trajectory(
            make_turn(actions=["Up"], success=game % 2 == 0),
            group=2 * game + seat,
            seat=seat,
            seats=2,
            success=game % 2 == 0,
            environment=("lake", "bandit")[game % 2],
        )
        for game in range(4)
        for seat in range(2)
    ]
    mixed.observe_played(played, groups=4, iteration=0, seed=0)
    assert mixed.metrics(1) == {"lake/curriculum_stage": 1.0}


def test_another_kind_of_curriculum_begins_anew(caplog):
    staged = mixture(curriculum=Curriculum(stages=FAR, above=0.5, fraction=0.5))
    sampled = mixture(curriculum=TaskSampling(stages=FAR))
    sampled.load_state_dict(staged.state_dict())
    assert (
        "env.environments.lake.curriculum: the checkpoint has the state of another" in caplog.text
    )
    assert sampled.metrics(0) == mixture(curriculum=TaskSampling(stages=FAR)).metrics(0)


def test_a_checkpoint_of_other_shares_is_refused():
    with pytest.raises(
        RolloutError, match=r"env.environments: the checkpoint has the shares .*lake"
    ):
        mixture(lake=2.0).load_state_dict(mixture().state_dict())


def test_each_environment_holds_out_the_states_of_its_own_validation_set(lm):
    one = managers()["lake"]
    proxy = AgentProxy(environments=one, context=ContextManager(lm), max_response_tokens=6)
    lakes = ValidationSet("lake", proxy, episodes=4, environment=True)
    bandits = ValidationSet("bandit", proxy, episodes=4, environment=True, keeps_states=False)
    data = data_of(lm, mixture(), validation_sets=[lakes, bandits])
    data.setup("fit")
    held = {name: one.held_out for name, one in data.proxy.environments.managers.items()}
    assert held == {"lake": frozenset(lakes.state_keys()), "bandit": frozenset()}
    assert {spec.environment for spec in lakes.episode_specs} == {"lake"}


def test_an_episode_of_no_environment_is_refused(lm):
    environments = EnvironmentMixture(managers())
    (spec, *_) = specs(lm, mixture(), iterations=1)
    spec.environment = None
    with pytest.raises(KeyError, match="found environment None"):
        environments.open([spec])


def sampled(lm, *, solves=(), rule="learnability", groups=6, **shares):
    """Return the module of a mixture that samples, whose episodes are solved in some environments."""

    def solve(trajectories, **_):
        for one in trajectories:
            one.success = one.environment in solves or (one.environment in half and one.member == 0)
            for turn in one.turns:
                turn.success = one.success

    half = {name.removeprefix("half ") for name in solves if name.startswith("half ")}
    mixed = Mixture(
        {
            "lake": MixedEnvironment(share=shares.get("lake", 1.0), rewards=[solve]),
            "bandit": MixedEnvironment(share=shares.get("bandit", 1.0), rewards=[solve]),
        },
        SamplingRule(rule=rule),
    )
    return data_of(lm, mixed, groups=groups), mixed


def counts_of(played):
    return Counter(one.environment for one in played if one.member == 0)


def test_groups_go_where_success_says_that_there_is_most_to_learn(lm):
    data, mixed = sampled(lm, solves=("half lake",))
    first, second = (data.collect(number, Module(lm)) for number in range(2))
    # nothing is known at first; then p (1 - p) is 0.25 in the lake and 0 for a bandit that is never solved
    assert counts_of(first) == {"lake": 3, "bandit": 3}
    assert mixed.shares_in(1) == pytest.approx({"lake": 0.95, "bandit": 0.05})
    assert counts_of(second)["lake"] in (5, 6)
    assert data.buffer.shares == mixed.shares_in(1)
    assert data.metrics["lake/share"] == pytest.approx(0.95)
    # the share that is set is a factor
    data, mixed = sampled(lm, solves=("half lake",), bandit=3.0)
    data.collect(0, Module(lm))
    assert mixed.shares_in(1)["bandit"] == pytest.approx(0.05 * 3 / (0.95 + 0.05 * 3))


def test_initial_states_of_a_sampled_environment_go_on_where_they_were(lm):
    data, _ = sampled(lm, solves=("half lake",))
    played = [one for number in range(3) for one in data.collect(number, Module(lm))]
    for name in ("lake", "bandit"):
        seeds = [one.seed for one in played if one.environment == name and one.member == 0]
        assert seeds == [derive_seed(0, "environment", name, n, 0) for n in range(len(seeds))]


def test_a_resumed_sampling_draws_the_same(lm):
    whole, _ = sampled(lm, solves=("half lake", "bandit"), rule="progress")
    before = [whole.collect(number, Module(lm)) for number in range(2)]
    state = whole.state_dict()
    resumed, _ = sampled(lm, solves=("half lake", "bandit"), rule="progress")
    resumed.load_state_dict(state)
    assert resumed.episode_specs(2) == whole.episode_specs(2)
    assert resumed.episode_specs(2) != sampled(lm)[0].episode_specs(2)
    assert before[0] != before[1]
    with pytest.raises(RolloutError, match=r"env\.sampling: the checkpoint's run samples its"):
        data_of(lm, mixture()).load_state_dict(state)
    plain = data_of(lm, mixture())
    with pytest.raises(RolloutError, match="does not sample its environments"):
        resumed.load_state_dict(plain.state_dict())


def test_ranks_sample_the_groups_of_one(lm, monkeypatch):
    whole, _ = sampled(lm)
    specs, parts = whole.episode_specs(0), []
    for rank in range(2):
        monkeypatch.setattr(datamodule, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(datamodule, "world_size", lambda: 2)
        parts += sampled(lm)[0].episode_specs(0)
    assert sorted(map(str, parts)) == sorted(map(str, specs))
