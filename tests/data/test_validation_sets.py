"""Fixed validation sets, episode specs, and training states apart from them by content."""

import logging
import re
import threading
from collections import Counter

import gymnasium
import pytest
from support.episodes.small_lakes import proxy_of
from support.runs.composing import composed

import envs  # noqa: F401 - registers the environments
from ragen_pl.base.seeding import derive_seed
from ragen_pl.data.datamodule import RolloutDataModule
from ragen_pl.data.settings import IterationSettings
from ragen_pl.data.validation import ValidationSet
from ragen_pl.environments.calls import manager_settings
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec, is_held_out

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


def test_members_of_an_initial_state_are_no_states_that_are_drawn_twice(lm, caplog):
    caplog.set_level(logging.INFO)
    proxy = proxy_of(lm, kwargs={"size": 6})
    keys = ValidationSet("held_out", proxy, episodes=64, members=2).held_out_keys()
    assert "are distinct" not in caplog.text and "takes about" not in caplog.text
    assert len(keys) == 64


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


# ---- a held-out fraction of the states


class Numbered(gymnasium.Env):
    """Environment whose initial state is the number of its seed."""

    action_names = ("Go",)
    action_space = gymnasium.spaces.Discrete(1)
    observation_space = gymnasium.spaces.Text(20)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = seed
        return "go", {}

    def state_key(self):
        return str(self.number)


def test_states_of_a_small_fraction_are_found_after_many_draws():
    manager = EnvironmentManager(target=f"{__name__}.Numbered", held_out_fraction=0.05)
    # of the first 100,000 seeds none takes more than 200 draws
    (slot,) = manager.open([EpisodeSpec(group=0, member=0, seed=106358, held_out=True)])
    assert slot.error is None and manager.redraws == 221
    assert is_held_out(slot.members.state_key(), 0.05)


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
    ["game_2048", "pocket_cube", "svg", pytest.param("countdown", marks=pytest.mark.environments)],
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
    rare = proxy_of(lm, kwargs={"size": 6, "hole_fraction": 0.2})
    ValidationSet("held_out", rare, episodes=30).held_out_keys()
    assert not caplog.records
    few = proxy_of(lm, target="ragen/PocketCube-v0", kwargs={"max_turns": 1})
    with caplog.at_level(logging.INFO):
        keys = ValidationSet("held_out", few, episodes=64).held_out_keys()
    assert len(keys) == 64 and "set env.held_out_fraction=0.2" in caplog.text
    assert f"{len(set(keys))} of the 64 initial states are distinct" in caplog.text
