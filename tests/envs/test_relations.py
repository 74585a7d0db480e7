"""Relations of the environments by hand, the same for text and images."""

import gymnasium
import pytest

import envs  # noqa: F401 - registers the environments
import visual_envs  # noqa: F401


@pytest.mark.parametrize("name", ["FrozenLake", "FrozenLakeVisual"])
def test_frozen_lake_relations_are_goal_and_adjacent_holes(name):
    environment = gymnasium.make(f"ragen/{name}-v0").unwrapped
    environment.reset(seed=0, options={"layout": ["FHFF", "FSHF", "FFFF", "HFFG"]})
    assert environment.relations() == [("goal", 2, 2), ("hole", -1, 0), ("hole", 0, 1)]
    environment.step(1)
    assert environment.relations() == [("goal", 1, 2), ("hole", -1, 1), ("hole", 1, -1)]
    assert {thing for thing, *_ in environment.relations()} <= set(environment.relation_names)


@pytest.mark.parametrize("name", ["Sokoban", "SokobanVisual"])
def test_sokoban_relations_are_boxes_and_targets(name):
    environment = gymnasium.make(f"ragen/{name}-v0", size=5).unwrapped
    environment.reset(seed=0, options={"layout": ["#####", "#P__#", "#_X_#", "#_O_#", "#####"]})
    assert environment.relations() == [("box", 1, 1), ("target", 2, 1)]
    environment.step(3)
    environment.step(1)
    assert environment.relations() == [("box", 1, 0), ("target", 1, 0)]
