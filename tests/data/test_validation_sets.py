"""Fixed validation sets, training states apart from them by content, the curriculum, the DataModule's memory."""

import logging
import re
import threading
from collections import Counter
from collections.abc import Set

import gymnasium
import pytest
import torch
from composing import composed

import envs  # noqa: F401 - registers the environments
from envs.frozen_lake import FrozenLake
from envs.policies import OptimalPolicy
from ragen_pl.data.curriculum import Curriculum
from ragen_pl.data.datamodule import RolloutDataModule
from ragen_pl.data.demonstrations import DemonstrationDataModule
from ragen_pl.data.settings import IterationSettings, WarmStartSettings
from ragen_pl.data.validation import ValidationSet
from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.environments.calls import manager_settings
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec, is_held_out
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout import attempts
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.settings import FailureSettings
from ragen_pl.seeding import derive_seed

# a small environment: initial states recur under many seeds
ENVIRONMENT = {"target": "ragen/FrozenLake-v0", "kwargs": {"size": 3, "hole_share": 0.1}}


def proxy_of(lm, **changes) -> AgentProxy:
    return AgentProxy(
        environments=EnvironmentManager(**(ENVIRONMENT | changes)),
        context=ContextManager(lm),
        max_response_tokens=6,
    )


class Module:
    """Rolls out with a model and assigns no credit."""

    global_step = 4

    def __init__(self, bundle) -> None:
        self.engine = TransformersEngine(PolicyModule(bundle))

    def rollout_engine(self):
        self.engine.load_weights(self.global_step)
        return self.engine

    def prepare(self, batch):
        return batch


# ---- validation sets


def test_validation_set_is_a_fixed_list_of_episodes(lm):
    validation_set = ValidationSet("held_out", proxy_of(lm), episodes=5)
    again = ValidationSet("other", proxy_of(lm, blank_images=True), episodes=5)
    assert [spec.seed for spec in validation_set.episode_specs] == [
        spec.seed for spec in again.episode_specs
    ]
    assert validation_set.digest() == again.digest() == "f45faa6327fb7b15"
    longer = ValidationSet("held_out", proxy_of(lm), episodes=6)
    assert (
        longer.episode_specs[:5] == validation_set.episode_specs
        and longer.digest() != validation_set.digest()
    )
    assert ValidationSet("x", proxy_of(lm), episodes=5, key="k").digest() != validation_set.digest()


def test_members_share_their_initial_state(lm):
    validation_set = ValidationSet("pass_at", proxy_of(lm), episodes=3, members=2, greedy=False)
    assert [(spec.group, spec.member) for spec in validation_set.episode_specs] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip
    keys = validation_set.state_keys()
    assert keys[::2] == keys[1::2] and len(set(keys)) == 3


def test_validation_set_requires_state_keys(lm):
    class Nameless(gymnasium.Env):
        action_names, action_space = ("On",), gymnasium.spaces.Discrete(1)
        observation_space = gymnasium.spaces.Text(10)

        def reset(self, *, seed=None, options=None):
            return "see", {}

    gymnasium.register(id="test/Nameless-v0", entry_point=Nameless)
    with pytest.raises(ValueError, match=r"no state_key\(\); set validation\.held_out=false"):
        ValidationSet(
            "held_out", proxy_of(lm, target="test/Nameless-v0", kwargs={}), episodes=2
        ).state_keys()


class Counted(gymnasium.Env):
    """Counts its instances. Its state key tells the thread that asks for it."""

    action_names, action_space = ("On",), gymnasium.spaces.Discrete(1)
    observation_space = gymnasium.spaces.Text(10)
    count = 0

    def __init__(self):
        Counted.count += 1

    def reset(self, *, seed=None, options=None):
        self.seed, self.thread = seed, threading.get_ident()
        return "see", {}

    def state_key(self):
        assert threading.get_ident() == self.thread
        return str(self.seed)


def test_initial_states_are_drawn_in_as_many_environments_as_a_rollout_has(lm):
    gymnasium.register(id="test/Counted-v0", entry_point=Counted)
    proxy = proxy_of(lm, target="test/Counted-v0", kwargs={}, workers=2)
    proxy.num_envs = 3
    keys = ValidationSet("held_out", proxy, episodes=8).state_keys()
    assert len(set(keys)) == 8 and Counted.count == 3


def test_failed_resets_are_reported(lm):
    broken = ValidationSet("held_out", proxy_of(lm), episodes=2, options={"min_distance": 99})
    with pytest.raises(
        RuntimeError, match=r"2 of 2 episodes of validation set 'held_out' failed.*min_distance"
    ):
        broken.state_keys()


def test_training_never_starts_in_an_initial_state_of_the_validation_set(lm):
    validation_set = ValidationSet("held_out", proxy_of(lm), episodes=60)
    held_out = set(validation_set.state_keys())

    def drawn(**settings):
        data = RolloutDataModule(
            proxy_of(lm),
            validation_sets=[validation_set],
            iteration=IterationSettings(groups=200, group_size=2),
            **settings,
        )
        data.setup("fit")
        slots = data.proxy.environments.open(data.episode_specs(0))
        keys = [slot.env.unwrapped.state_key() for slot in slots]
        assert keys[::2] == keys[1::2]
        return set(keys)

    assert drawn(held_out=False) & held_out  # the same content does come under other seeds
    assert not drawn() & held_out


# ---- episode specs


def test_episode_specs_depend_on_seed_iteration_and_group(lm):
    def specs(iteration, seed=0, groups=4):
        return RolloutDataModule(
            proxy_of(lm), iteration=IterationSettings(groups=groups, group_size=3), seed=seed
        ).episode_specs(iteration)

    first = specs(0)
    assert [(s.group, s.member) for s in first] == [(g, m) for g in range(4) for m in range(3)]
    assert all(len({s.seed for s in first if s.group == g}) == 1 for g in range(4))
    assert len({s.seed for s in first}) == 4
    assert first == specs(0) == specs(0, groups=9)[:12]
    assert not {s.seed for s in first} & {s.seed for s in specs(1)}
    assert not {s.seed for s in first} & {s.seed for s in specs(0, seed=1)}


def test_ranks_play_whole_groups(lm, monkeypatch):
    data = RolloutDataModule(proxy_of(lm), iteration=IterationSettings(groups=5, group_size=2))
    alone = data.episode_specs(3)
    monkeypatch.setattr("ragen_pl.data.datamodule.world_size", lambda: 2)
    shares = []
    for number in range(2):
        monkeypatch.setattr("ragen_pl.data.datamodule.rank", lambda number=number: number)
        shares.append(data.episode_specs(3))
    assert [{s.group for s in share} for share in shares] == [{0, 2, 4}, {1, 3}]
    assert sorted(shares[0] + shares[1], key=lambda s: (s.group, s.member)) == alone


# ---- curriculum

FAR: list[dict[str, int]] = [{}, {"min_distance": 3}]


def test_curriculum_starts_after_a_full_window_of_success():
    curriculum = Curriculum(stages=FAR, above=0.5, share=0.5, window=3)
    for iteration, success in enumerate([1.0, 1.0]):
        curriculum.observe(success, iteration=iteration)
    assert not curriculum.starts  # the window is not full yet
    curriculum.observe(0.2, iteration=2)
    assert curriculum.starts == [3]

    def hard(iteration):
        return [
            curriculum.options_for(g, groups=4, iteration=iteration) is not None for g in range(4)
        ]

    assert hard(2) == [False] * 4 and hard(3) == [True, True, False, False]
    for iteration in range(3, 8):
        curriculum.observe(0.0, iteration=iteration)
    assert hard(8) == [True, True, False, False]  # it never goes back


def test_curriculum_needs_a_mean_above_the_bound():
    curriculum = Curriculum(stages=FAR, above=0.5, share=0.5, window=2)
    curriculum.observe(0.5, iteration=0)
    curriculum.observe(0.5, iteration=1)
    assert not curriculum.starts


def test_curriculum_averages_each_stage_anew_and_mixes_it_with_those_before():
    curriculum = Curriculum(stages=[{"size": 4}, {"size": 5}, {}], above=0.5, share=0.5, window=2)
    for iteration in range(8):
        curriculum.observe(1.0, iteration=iteration)
    assert curriculum.starts == [2, 4]  # the last stage has none after it

    def played(iteration):
        return [curriculum.options_for(g, groups=8, iteration=iteration) for g in range(8)]

    small, medium = {"size": 4}, {"size": 5}
    assert played(1) == [small] * 8
    assert played(3) == [medium] * 4 + [small] * 4
    assert played(4) == [None] * 4 + [small, medium] * 2


def test_curriculum_needs_a_stage_to_go_on_to():
    with pytest.raises(ValueError, match=r"stages: found \[{}\], expected two or more"):
        Curriculum(stages=[{}], above=0.5, share=0.5)


def test_resumed_curriculum_continues_identically():
    curriculum = Curriculum(stages=FAR, above=0.5, share=0.5, window=3)
    for iteration in range(2):
        curriculum.observe(0.9, iteration=iteration)
    resumed = Curriculum(stages=FAR, above=0.5, share=0.5, window=3)
    resumed.load_state_dict(curriculum.state_dict())
    for each in (curriculum, resumed):
        each.observe(0.9, iteration=2)
    assert curriculum.starts == resumed.starts == [3]
    assert curriculum.state_dict() == resumed.state_dict()


def test_a_stage_ends_by_its_own_success(lm, monkeypatch):
    """Groups of earlier stages, which are easier, do not count."""
    rollout = AgentProxy.rollout

    def played(proxy, responder, specs, **settings):
        trajectories = rollout(proxy, responder, specs, **settings)
        for trajectory, spec in zip(trajectories, specs, strict=True):
            trajectory.success = spec.options == {"min_distance": 1}
        return trajectories

    monkeypatch.setattr(AgentProxy, "rollout", played)
    stages = [{"min_distance": 1}, {"min_distance": 2}, {}]
    curriculum = Curriculum(stages=stages, above=0.5, share=0.25, window=1)
    data = RolloutDataModule(
        proxy_of(lm), iteration=IterationSettings(groups=4, group_size=2), curriculum=curriculum
    )
    for iteration in range(3):
        data.collect(iteration, Module(lm))
    assert data.metrics["success"] == 0.75 and curriculum.starts == [1]


def test_hard_groups_get_the_options(lm):
    curriculum = Curriculum(stages=FAR, above=0.5, share=0.5)
    curriculum.starts = [2]
    data = RolloutDataModule(
        proxy_of(lm), iteration=IterationSettings(groups=4, group_size=2), curriculum=curriculum
    )
    assert all(spec.options is None for spec in data.episode_specs(1))
    assert [spec.options for spec in data.episode_specs(2)] == [{"min_distance": 3}] * 4 + [
        None
    ] * 4
    slots = data.proxy.environments.open(data.episode_specs(2)[:4])
    assert all(slot.difficulty >= 3 for slot in slots)


# ---- the DataModule's memory


def test_checkpoint_restores_buffer_metrics_and_curriculum(lm):
    def make():
        curriculum = Curriculum(stages=FAR, above=0.0, share=0.5, window=1)
        return RolloutDataModule(
            proxy_of(lm), iteration=IterationSettings(groups=3, group_size=2), curriculum=curriculum
        )

    data, module = make(), Module(lm)
    with pytest.raises(RuntimeError, match="RolloutUpdate"):
        data.train_dataloader()
    trajectories = data.collect(4, module)
    assert len(trajectories) == 6 and module.engine.version == 4
    data.curriculum.observe(1.0, iteration=4)
    assert data.has_buffer(4) and not data.has_buffer(5)
    other = make()
    other.load_state_dict(data.state_dict())
    assert other.has_buffer(4) and other.metrics == data.metrics
    assert other.curriculum.starts == data.curriculum.starts == [5]
    for minibatch, restored in zip(data.train_dataloader(), other.train_dataloader(), strict=True):
        assert minibatch.samples.input_ids.tolist() == restored.samples.input_ids.tolist()
    data.drop_buffer()
    other.load_state_dict(data.state_dict())
    assert not other.has_buffer(4)


def test_iteration_of_failed_episodes_stops_the_run(lm):
    data = RolloutDataModule(
        proxy_of(lm, held_out=_Everything()), iteration=IterationSettings(groups=2)
    )
    with pytest.raises(
        RolloutError,
        match=r"iteration 1: 2 of 2 episodes failed and drop 2 groups; .*min_fraction=0.9, .*held out.*\(2 times",
    ):
        data.collect(0, Module(lm))


class Breaking(FrozenLake):
    """Fails for three seeds in four, always."""

    def reset(self, *, seed=None, options=None):
        if seed % 4:
            raise OSError(f"no simulator for {seed}")
        return super().reset(seed=seed, options=options)


def test_failed_episodes_are_no_outcome_and_end_the_run_from_a_fraction_on(lm, caplog):
    gymnasium.register("test/Breaking-v0", entry_point=Breaking)

    def limited(min_fraction: float) -> RolloutDataModule:
        proxy = proxy_of(lm, target="test/Breaking-v0")
        proxy.failures = FailureSettings(min_fraction=min_fraction)
        iteration = IterationSettings(groups=16, group_size=2)
        return RolloutDataModule(proxy, iteration=iteration, seed=3)

    data = limited(0.0)
    played = data.collect(0, Module(lm))
    failed = sum(trajectory.error is not None for trajectory in played)
    assert 16 < failed < 32
    assert (data.metrics["failed_episodes"], data.metrics["episodes"]) == (failed, 32 - failed)
    sound = [one.reward for one in played if one.error is None]
    assert data.metrics["return"] == pytest.approx(sum(sound) / len(sound))
    # one kind of error, and one line
    assert caplog.text.count("no simulator") == 1
    assert f"{failed} of 32 episodes failed with OSError: no simulator for" in caplog.text
    data.collect(1, Module(lm))
    assert "episodes failed with errors that are named above" in caplog.text

    assert data.metrics["failed_data"] == failed and data.metrics["failed_infrastructure"] == 0
    assert data.metrics["dropped_groups"] == failed / 2
    assert data.metrics["trained_fraction"] == 1 - failed / 32

    caplog.clear()
    limited(1 - failed / 32).collect(0, Module(lm))
    assert "once more" not in caplog.text
    with pytest.raises(
        RolloutError, match=f"{failed} of 32 episodes failed and .*no simulator"
    ) as raised:
        limited(1 - (failed - 1) / 32).collect(0, Module(lm))
    assert "\n" not in str(raised.value) and caplog.text.count("it is played once more") == 1


class Lossy(FrozenLake):
    """Loses its connection in resets that are chosen by their number."""

    lost: Set[int] = frozenset()
    resets = 0

    def reset(self, *, seed=None, options=None):
        number, Lossy.resets = Lossy.resets, Lossy.resets + 1
        if number in self.lost:
            raise ConnectionResetError("the simulator has gone")
        return super().reset(seed=seed, options=options)


@pytest.fixture
def lossy(lm, monkeypatch):
    """Return a function that makes the data of an iteration of 3 groups of 4."""
    if "test/Lossy-v0" not in gymnasium.registry:
        gymnasium.register("test/Lossy-v0", entry_point=Lossy)
    monkeypatch.setattr(attempts, "_PAUSE_S", 0.0)

    def make(lost: Set[int], **failures) -> RolloutDataModule:
        monkeypatch.setattr(Lossy, "lost", lost)
        monkeypatch.setattr(Lossy, "resets", 0)
        proxy = proxy_of(lm, target="test/Lossy-v0")
        proxy.failures = FailureSettings(**failures)
        return RolloutDataModule(proxy, iteration=IterationSettings(groups=3, group_size=4), seed=3)

    return make


def test_a_group_with_too_few_members_is_not_trained_on(lm, lossy):
    # the second member of the first group, and two of the second one
    data = lossy({1, 5, 6}, attempts=1, min_fraction=0.5)
    data.collect(0, Module(lm))
    assert data.buffer.episodes.group.tolist() == [0] * 3 + [2] * 4
    assert data.buffer.episodes.member.tolist() == [0, 2, 3, 0, 1, 2, 3]
    metrics = data.metrics
    assert (metrics["failed_episodes"], metrics["dropped_groups"]) == (3.0, 1.0)
    assert metrics["trained_fraction"] == 7 / 12 and metrics["failed_turns"] == 0.0
    whole = lossy({1}, attempts=1, min_fraction=0.5, min_group_fraction=1.0)
    whole.collect(0, Module(lm))
    assert set(whole.buffer.episodes.group.tolist()) == {1, 2}


def test_an_iteration_with_too_few_episodes_is_played_once_more(lm, lossy, caplog):
    sound = lossy(set())
    sound.collect(0, Module(lm))
    data = lossy(set(range(12)), attempts=1)
    data.collect(0, Module(lm))
    assert (
        Lossy.resets == 24 and "iteration 1: 12 of 12 episodes failed; it is played" in caplog.text
    )
    assert data.buffer.samples.input_ids.tolist() == sound.buffer.samples.input_ids.tolist()
    assert data.metrics["trained_fraction"] == 1.0 and data.metrics["retried"] == 0.0
    again = lossy(set(range(12)), attempts=2)
    again.collect(0, Module(lm))
    assert Lossy.resets == 24 and again.metrics["retried"] == 12.0
    assert again.buffer.samples.input_ids.tolist() == sound.buffer.samples.input_ids.tolist()


class _Everything:
    """Holds out whatever is asked for."""

    def __contains__(self, key: object) -> bool:
        return True

    def __len__(self) -> int:
        return 1


# ---- demonstrations


def demonstrations(lm, *, policy=None, proxy=None, **changes) -> DemonstrationDataModule:
    environments = EnvironmentManager(**ENVIRONMENT)
    data = DemonstrationDataModule(
        AgentProxy(environments=environments, context=ContextManager(lm), **(proxy or {})),
        policy=policy or OptimalPolicy(),
        settings=WarmStartSettings(
            **({"episodes": 12, "batch_size": 8, "steps": 20, "gamma": 0.5} | changes)
        ),
        seed=0,
    )
    data.setup("fit")
    return data


def test_demonstrations_are_served_in_steps_of_the_batch_size(lm):
    data = demonstrations(lm)
    samples, loader = data.batch.samples, data.train_dataloader()
    assert data.statistics["success"] == 1.0 and len(loader) >= 20
    an_epoch = -(-len(samples) // 8)
    sizes = [len(step.samples) for _, step in zip(range(an_epoch), loader, strict=False)]
    assert sum(sizes) == len(samples) and max(sizes) <= 8


def test_demonstrations_take_the_stages_of_the_warm_start_in_turn(lm):
    # a turn is a step of a shortest path
    turns = demonstrations(lm, stages=[{}, {"min_distance": 4}]).batch.episodes.turns
    assert len(turns) == 12 and turns[1::2].min() >= 4 and turns[::2].min() < 4


class Forgetful(OptimalPolicy):
    """Raises in some states."""

    def act(self, env, rng):
        if env.unwrapped.state_key().endswith(("0", "4")):
            raise LookupError("where was I")
        return super().act(env, rng)


def test_demonstrations_that_fail_are_left_out_and_reported(lm, caplog):
    caplog.set_level(logging.WARNING)
    data = demonstrations(lm, policy=Forgetful())
    assert 0 < data.statistics["failed"] < 1
    assert re.search(r"\d+ of 12 episodes failed with Forgetful: where was I", caplog.text)
    assert "max_response_tokens" not in caplog.text


def test_demonstrations_that_a_policy_could_not_sample_are_reported(lm, caplog):
    caplog.set_level(logging.WARNING)
    demonstrations(lm, proxy={"max_response_tokens": 8})
    assert re.search(r"max_response_tokens=8: (\d+) of \1 demonstrated responses", caplog.text)


def test_target_of_a_demonstrated_turn_is_its_discounted_return(lm):
    data = demonstrations(lm)
    samples = data.batch.samples
    for row in range(len(samples)):
        episode = int(samples.episode[row])
        sampled = samples.turn[row] >= 0
        turn, turns = int(samples.turn[row].max()), int(data.batch.episodes.turns[episode])
        assert (samples.returns[row][sampled] == 0.5 ** (turns - 1 - turn)).all()
        assert (samples.returns[row][~sampled] == 0).all()


def test_ranks_with_different_numbers_of_samples_take_the_same_number_of_steps(lm, monkeypatch):
    name = "ragen_pl.data.demonstrations"
    monkeypatch.setattr(f"{name}.world_size", lambda: 2)
    ranks = []
    for number in range(2):
        monkeypatch.setattr(f"{name}.rank", lambda number=number: number)
        ranks.append(demonstrations(lm, episodes=13, batch_size=2))
    counts = [len(data.batch.samples) for data in ranks]
    assert counts[0] != counts[1]

    def summed(
        tensor,
    ):  # the number of samples is the one scalar; counts of tokens don't matter here
        return torch.tensor(sum(counts)) if tensor.ndim == 0 else tensor

    monkeypatch.setattr(f"{name}.sum_over_ranks", summed)
    lengths = {len(data.train_dataloader()) for data in ranks}
    assert len(lengths) == 1 and lengths.pop() >= 20


# ---- a held-out fraction of the states


def initial_states(name: str, *, held_out: bool, count: int = 240) -> list[tuple[str, object]]:
    """Return keys and features of the initial states that a shipped environment draws for one side."""
    cfg = composed(f"env={name}", "logger=none")
    manager = EnvironmentManager(**manager_settings(cfg.env))
    specs = [
        EpisodeSpec(group=n, member=0, seed=derive_seed(n, "side", held_out), held_out=held_out)
        for n in range(count)
    ]
    slots = manager.open(specs)
    assert not [slot.error for slot in slots if slot.error]
    # each side redraws as rarely as its fraction of the states allows
    expected = 4.0 if held_out else 0.25
    assert 0.3 * expected < manager.redraws / manager.resets < 3 * expected
    states = []
    for slot in slots:
        key = slot.env.unwrapped.state_key()
        tiles = sorted(re.findall(r"\d+", key)) if name == "game_2048" else None
        states.append((key, (slot.difficulty, str(tiles))))
    manager.close(slots)
    return states


@pytest.mark.parametrize(
    "name",
    ["game_2048", "pocket_cube", pytest.param("countdown", marks=pytest.mark.environments)],
)
def test_a_held_out_fraction_keeps_the_distribution_on_both_sides(name):
    training, validation = (initial_states(name, held_out=side) for side in (False, True))
    assert not {key for key, _ in training} & {key for key, _ in validation}
    left, right = (Counter(feature for _, feature in side) for side in (training, validation))
    distance = sum(abs(left[each] - right[each]) for each in left | right) / 480
    assert distance < 0.15


def test_a_fraction_of_the_states_is_held_out_by_hash():
    keys = [f"state {number}" for number in range(4000)]
    inner = {key for key in keys if is_held_out(key, 0.2)}
    assert 0.17 < len(inner) / len(keys) < 0.23
    # a larger fraction holds out these states and more
    assert inner < {key for key in keys if is_held_out(key, 0.4)}


def test_likely_states_in_the_validation_set_are_warned_of(lm, caplog):
    rare = proxy_of(lm, kwargs={"size": 6, "hole_share": 0.2})
    ValidationSet("held_out", rare, episodes=30).held_out_keys()
    assert not caplog.records
    few = proxy_of(lm, target="ragen/PocketCube-v0", kwargs={"max_turns": 1})
    keys = ValidationSet("held_out", few, episodes=30).held_out_keys()
    assert len(keys) == 30 and "set env.held_out_fraction=0.2" in caplog.text
