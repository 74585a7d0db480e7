"""Records and conversations as the samples of a warm start."""

import copy
import json
import logging
import os
from dataclasses import fields, replace
from functools import partial

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from PIL import Image
from support.episodes.small_lakes import ENVIRONMENT
from support.runs.composing import composed

import envs  # noqa: F401 - registers the environments
import visual_envs  # noqa: F401
from envs.policies import NoisyPolicy, OptimalPolicy
from ragen_pl.base.records import Origin, write_episodes
from ragen_pl.base.seeding import derive_seed
from ragen_pl.data.batch import Episodes, Samples
from ragen_pl.data.collate import collate
from ragen_pl.data.demonstrations import set_discounted_returns
from ragen_pl.data.loader import MinibatchLoader
from ragen_pl.data.recorded_episodes import RecordedTurn, learns
from ragen_pl.data.records import RecordDataModule, check_records
from ragen_pl.data.settings import RecordSettings, WarmStartSettings
from ragen_pl.data.validation import ValidationSet
from ragen_pl.engines.errors import RolloutError
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec, is_held_out
from ragen_pl.modules.critic import CriticModule
from ragen_pl.modules.policy import PolicyModule, TokenReadout
from ragen_pl.modules.warm_start import WarmStartModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.scripted import ScriptedResponder

VISUAL = {"target": "ragen/FrozenLakeVisual-v0", "kwargs": {"size": 3, "hole_fraction": 0.1}}
NOISY = NoisyPolicy(noise=0.5, base="optimal")


def proxy_of(bundle, *, environment=ENVIRONMENT, context=None, **changes) -> AgentProxy:
    context = ContextManager(bundle, **({"window": 1} | (context or {})))
    return AgentProxy(environments=EnvironmentManager(**(environment | changes)), context=context)


def play(proxy, folder, *, groups=6, members=2, policy=NOISY, options=None, origin=None, key=0):
    """Play episodes as an iteration does, and record them."""
    specs = [
        EpisodeSpec(
            group=group, member=member, seed=derive_seed(key, "environment", group),
            options=options, held_out=False,
        )
        for group in range(groups)
        for member in range(members)
    ]  # fmt: skip
    responder = ScriptedResponder(policy=policy)
    trajectories = proxy.rollout(responder, specs, seed_key=(key, "sample"))
    write_episodes(trajectories, folder, reader=proxy.context, origin=origin)
    return trajectories


def learned(proxy, path, *, validation_set=None, values=True, stages=None, **records):
    data = RecordDataModule(
        proxy,
        records=RecordSettings(
            path=str(path), **({"rule": "all", "turns": "all"} | records)
        ),
        validation_set=validation_set,
        states=8,
        learns_values=values,
        settings=WarmStartSettings(batch_size=8, steps=20, gamma=0.5, stages=stages),
        seed=0,
    )  # fmt: skip
    data.setup("fit")
    return data


def assert_equal_samples(one, other) -> None:
    for column in fields(Samples):
        assert torch.equal(
            getattr(one.samples, column.name), getattr(other.samples, column.name)
        ), column.name
    assert len(one.images) == len(other.images)
    assert all(map(torch.equal, one.images, other.images))


# ---- the same samples as demonstrations


@pytest.mark.parametrize("context", [{"window": 1}, {"window": 2}, {"window": "all"}])
@pytest.mark.parametrize("kind", ["lm", "vlm"])
def test_records_give_the_samples_of_the_episodes_themselves(kind, context, request, tmp_path):
    bundle = request.getfixturevalue(kind)
    context = context | {
        "system_prompt": "instructions",
        "turn_template": "{last_action}: {observation}",
    }
    proxy = proxy_of(bundle, environment=VISUAL if kind == "vlm" else ENVIRONMENT, context=context)
    played = play(proxy, tmp_path)
    expected = collate(played, bundle)
    set_discounted_returns(expected, gamma=0.5)
    batch = learned(proxy, tmp_path).batch
    assert_equal_samples(batch, expected)
    assert torch.equal(batch.episodes.turn_rewards, expected.episodes.turn_rewards)
    assert batch.samples.loss_mask.any() and (kind == "lm") == (not batch.images)


def test_conversations_give_the_samples_of_the_same_responses(vlm, tmp_path):
    proxy = proxy_of(vlm, environment=VISUAL, context={"window": "all"})
    played = play(proxy, tmp_path / "played", policy=OptimalPolicy(), members=1)
    lines = []
    for number, one in enumerate(played):
        messages = []
        for place, turn in enumerate(one.turns):
            Image.fromarray(turn.observation.images[0]).save(tmp_path / f"{number}_{place}.png")
            shown = {"type": "image", "image": f"{number}_{place}.png"}
            text = {"type": "text", "text": turn.observation.text}
            messages += [{"role": "user", "content": [shown, text]}]
            messages += [{"role": "assistant", "content": turn.response_text}]
        lines.append(
            json.dumps({"messages": messages, "return": one.reward, "success": one.success})
        )
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(lines) + "\n")
    expected = collate(played, vlm)
    set_discounted_returns(expected, gamma=0.5)
    assert_equal_samples(learned(proxy, file, rule="success", turns="valid").batch, expected)


def test_images_of_a_line_are_taken_in_turn(vlm, tmp_path):
    proxy = proxy_of(vlm, environment=VISUAL)
    for name, shade in (("a.jpg", 40), ("b.png", 200)):
        Image.fromarray(np.full((32, 32, 3), shade, np.uint8)).save(tmp_path / name)
    part = [{"type": "image"}, {"type": "text", "text": "go"}]
    response = {"role": "assistant", "content": "<think>x</think><answer>Up</answer>"}
    line = {
        "messages": [{"role": "user", "content": part}, response] * 2,
        "images": ["a.jpg", "b.png"],
    }
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps(line))
    images = learned(proxy, file, values=False).batch.images
    assert [int(image[0, 0, 0]) for image in images] == [40, 200]
    for changed, message in (
        ({"images": ["a.jpg"]}, "found the part"),
        ({"images": ["a.jpg"] * 3}, "1 of its images"),
    ):
        file.write_text(json.dumps(line | changed))
        with pytest.raises(ValueError, match=message):
            learned(proxy, file, values=False)


# ---- weights


def test_weights_follow_the_rule_and_the_critic_learns_all(lm, tmp_path):
    proxy = proxy_of(lm)
    played = play(proxy, tmp_path, groups=8, members=3)
    solved = [one.success for one in played]
    assert 0 < sum(solved) < len(solved)
    batch = learned(proxy, tmp_path, rule="success").batch
    samples = batch.samples
    of_row = torch.tensor(solved)[samples.episode]
    sampled = samples.turn >= 0
    assert torch.equal(samples.loss_mask, sampled & of_row[:, None])
    assert torch.equal(samples.advantage_mask, sampled) and torch.equal(samples.value_mask, sampled)
    without = learned(proxy, tmp_path, rule="success", values=False).batch.samples
    assert torch.equal(without.loss_mask, without.turn >= 0) and len(without) == int(of_row.sum())
    # the best of each initial state: the first with the highest return
    weight = learned(proxy, tmp_path, rule="best").batch.episodes.weight
    for group in range(8):
        returns = [one.reward for one in played[3 * group : 3 * group + 3]]
        own = weight[3 * group : 3 * group + 3].tolist()
        assert own.index(1.0) == returns.index(max(returns)) and sum(own) == 1.0
    both = learned(proxy, tmp_path, rule="exponential", temperature=0.5).batch.samples
    ratio = torch.exp(torch.tensor(1.0 / 0.5))
    assert (both.weight.max() / both.weight.min()).item() == pytest.approx(ratio.item(), rel=1e-5)
    assert torch.equal(both.loss_weight, both.loss_mask.float())


def test_all_initial_states_may_count_alike(lm, tmp_path):
    proxy = proxy_of(lm)
    played = play(proxy, tmp_path, groups=8, members=3)
    weight = learned(proxy, tmp_path, rule="success", per_group=True).batch.episodes.weight
    sums = weight.view(8, 3).sum(1)
    solved = torch.tensor([one.success for one in played]).view(8, 3).any(1)
    assert torch.allclose(sums, sums.max() * solved)


def test_turns_without_a_valid_or_effective_action_are_left_out(lm, tmp_path):
    class Stumbles(OptimalPolicy):
        def act(self, env, rng):
            action = super().act(env, rng)
            walls = 0 if env.unwrapped.cell < 3 else action
            return "" if rng.random() < 0.3 else walls if rng.random() < 0.5 else action

    proxy = proxy_of(lm, invalid_ends=False)
    played = play(proxy, tmp_path, policy=Stumbles())
    for turns in ("all", "valid", "effective"):
        samples = learned(proxy, tmp_path, turns=turns).batch.samples
        expected = [
            turns == "all"
            or (turn.action_is_valid and (turns == "valid" or turn.action_is_effective))
            for one in played
            for turn in one.turns
        ]
        assert samples.loss_mask.any(1).tolist() == expected
    assert not all(expected)


def test_summaries_are_learned_where_turns_without_an_effect_are_left_out():
    turn = RecordedTurn(text="", images=[], response="two keys", effective=False)
    settings = RecordSettings(turns="effective")
    assert learns(replace(turn, advances=False), settings) and not learns(turn, settings)
    assert not learns(replace(turn, advances=False, valid=False), settings)


def test_a_number_of_episodes_is_drawn_from_the_seed(lm, tmp_path):
    proxy = proxy_of(lm)
    play(proxy, tmp_path)
    some = learned(proxy, tmp_path, episodes=5).batch
    assert len(some.episodes.weight) == 5
    assert_equal_samples(some, learned(proxy, tmp_path, episodes=5).batch)


def test_records_without_an_episode_to_learn_are_refused(lm, tmp_path):
    proxy = proxy_of(lm)
    play(proxy, tmp_path, policy=NoisyPolicy(noise=0.0, base="optimal"), groups=2)
    with pytest.raises(
        ValueError, match=r"none of 4 episodes passes it .* highest return is 1, and 4"
    ):
        learned(proxy, tmp_path, rule="threshold", threshold=2.0)


# ---- held-out states


def validation_set(proxy, episodes=8) -> ValidationSet:
    return ValidationSet("held_out", proxy, episodes=episodes)


def test_records_of_the_validation_set_are_refused_by_name_and_by_seed(lm, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    proxy = proxy_of(lm)
    held_out = validation_set(proxy)
    scripted = held_out.play_scripted(OptimalPolicy(), name="optimal")
    write_episodes(scripted, tmp_path / "named", origin=Origin(validation_set="held_out"))
    write_episodes(scripted, tmp_path / "renamed", origin=Origin())
    play(proxy, tmp_path / "own")
    for name in ("named", "renamed"):
        with pytest.raises(ValueError, match="8 of 8 episodes are of the held-out validation set"):
            learned(proxy, tmp_path / name)
    with pytest.raises(ValueError, match="16 of 28 episodes are of the held-out"):
        learned(proxy, tmp_path)
    data = learned(proxy, tmp_path, held_out="skip")
    assert "16 of 28 episodes are of the held-out validation set, and are left out" in caplog.text
    assert len(data.batch.episodes.weight) == 12


@pytest.mark.parametrize("fraction", [None, 0.5])
def test_records_that_begin_in_a_held_out_state_are_known_by_it(lm, tmp_path, fraction, caplog):
    """A small lake: states recur under other seeds."""
    caplog.set_level(logging.INFO)
    recording = proxy_of(lm)
    played = play(recording, tmp_path, groups=20, members=1, policy=OptimalPolicy())
    proxy = proxy_of(lm, held_out_fraction=fraction)
    held_out = validation_set(proxy, episodes=40)
    keys, env = set(held_out.state_keys()), EnvironmentManager(**ENVIRONMENT).make()

    def is_out(one) -> bool:
        env.reset(seed=one.seed)
        key = env.unwrapped.state_key()
        return is_held_out(key, fraction) if fraction else key in keys

    out = [is_out(one) for one in played]
    assert 0 < sum(out) < 20
    message = f"{sum(out)} of 20 episodes begin in an initial state of the held-out"
    with pytest.raises(ValueError, match=message):
        learned(recording, tmp_path, validation_set=held_out)
    data = learned(recording, tmp_path, validation_set=held_out, held_out="skip")
    assert message in caplog.text and len(data.batch.episodes.weight) == 20 - sum(out)
    # the run's own training draws another state in place of one that is held out
    barred = replace(recording, environments=EnvironmentManager(
        **ENVIRONMENT, held_out=frozenset(keys), held_out_fraction=fraction))  # fmt: skip
    play(barred, tmp_path / "own", groups=20, members=1)
    kept = learned(recording, tmp_path / "own", validation_set=held_out).batch
    assert len(kept.episodes.weight) == 20


def test_conversations_that_begin_in_a_held_out_state_are_known_by_what_they_show(lm, tmp_path):
    proxy = proxy_of(lm)
    held_out = validation_set(proxy)
    scripted = held_out.play_scripted(OptimalPolicy(), name="optimal")
    file = tmp_path / "chats.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": one.turns[0].observation.text},
                      {"role": "assistant", "content": one.turns[0].response_text}]}
        for one in scripted
    ]  # fmt: skip
    file.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ValueError, match="8 of 8 episodes begin in an initial state"):
        learned(proxy, file, validation_set=held_out, values=False)


# ---- records of something else


def test_records_of_another_environment_are_refused(lm, tmp_path):
    proxy = proxy_of(lm)
    play(proxy, tmp_path)
    other = proxy_of(lm, kwargs={"size": 4})
    with pytest.raises(ValueError, match=r"12 of 12 episodes begin in another state .*env\.kwargs"):
        learned(other, tmp_path)


def test_reset_options_are_those_of_the_stages(lm, tmp_path):
    proxy = proxy_of(lm)
    play(proxy, tmp_path, options={"min_distance": 3})
    with pytest.raises(ValueError, match=r"episodes begin in another state .*warm_start\.stages"):
        learned(proxy, tmp_path)
    assert learned(proxy, tmp_path, stages=[{}, {"min_distance": 3}]).batch is not None


@pytest.mark.parametrize(
    "changes",
    [{"window": "all"}, {"system_prompt": "Walk."}],
)
def test_records_with_other_prompts_are_refused(lm, tmp_path, changes):
    play(proxy_of(lm, context={"window": 2}), tmp_path)
    with pytest.raises(
        ValueError, match=r"turn [123]: its prompt is not the one that the run would have"
    ):
        learned(proxy_of(lm, context={"window": 2} | changes), tmp_path)


def edited(folder, change) -> None:
    """Change each record of a folder."""
    file = folder / "trajectories.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for record in records:
        change(record)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_changed_records_are_refused(vlm, tmp_path):
    proxy = proxy_of(vlm, environment=VISUAL)
    image = vlm.image_token_id

    def set_turn(**values):
        return lambda record: record["turns"][-1].update(values)

    changes = {
        "its response .* has token": set_turn(response_ids=[image, image], spans=[0, 0]),
        "has a token id below 0": set_turn(response_ids=[-1], spans=[0]),
        "spans do not fit": set_turn(response_ids=[5], spans=[99]),
        "its response 'other' has the text": set_turn(response="other"),
        "its prompt is not the one": lambda record: record["turns"][-1]["prompt_ids"].append(7),
        "its prompt has other images": set_turn(prompt_images=[]),
        r"\.\./secret.png is no PNG": set_turn(images=["../secret.png"]),
        "context.leave_out": set_turn(turns_left_out=[1]),
        "valid=.yes.: expected true or false": set_turn(valid="yes"),
        "has no reward": set_turn(reward=None),
        "has a reward of nan, expected": set_turn(reward=float("nan")),
        r"has a reward of -1e\+30, expected": set_turn(reward=-1e30),
    }
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "secret.png")
    for number, (message, change) in enumerate(changes.items()):
        folder = tmp_path / str(number)
        play(proxy, folder, groups=2, members=1)
        assert learned(proxy, folder).batch is not None
        edited(folder, change)
        with pytest.raises(ValueError, match=message):
            learned(proxy, folder)


def test_only_plain_files_of_the_folder_are_opened(vlm, tmp_path):
    proxy = proxy_of(vlm, environment=VISUAL)
    folder = tmp_path / "given"
    play(proxy, folder, groups=2, members=1)
    picture = next((folder / "images").iterdir())
    pixels = np.asarray(Image.open(picture))
    Image.fromarray(255 - pixels).save(picture)
    with pytest.raises(ValueError, match="has other pixels than were recorded"):
        learned(proxy, folder)
    picture.rename(tmp_path / "elsewhere.png")
    picture.symlink_to(tmp_path / "elsewhere.png")
    with pytest.raises(ValueError, match="or a link leads to it"):
        learned(proxy, folder)
    picture.unlink()
    os.mkfifo(picture)
    with pytest.raises(ValueError, match="is no PNG or JPEG"):
        learned(proxy, folder)
    records = folder / "trajectories.jsonl"
    records.rename(tmp_path / "elsewhere.jsonl")
    records.symlink_to(tmp_path / "elsewhere.jsonl")
    with pytest.raises(ValueError, match="is a link"):
        learned(proxy, folder)
    with pytest.raises(ValueError, match=r"there is no trajectories\.jsonl"):
        learned(proxy, folder / "images")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "expected a record or a conversation"),
        ('{"messages": []}', "found roles"),
        (
            '{"messages": [{"role": "user", "content": 3}]}',
            r"messages\[0\].content=3: expected a text or a list",
        ),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "found roles"),
        ('{"schema": 1}', "found schema 1"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "return": NaN}',
            "has a reward of nan, expected one between",
        ),
        ("[" * 10_000, "expected a record or a conversation"),
    ],
)
def test_lines_that_are_no_conversation_are_refused(lm, tmp_path, line, message):
    file = tmp_path / "chats.jsonl"
    file.write_text(line)
    with pytest.raises(ValueError, match=f"chats.jsonl, line 1: {message}"):
        learned(proxy_of(lm), file, values=False)


def test_conversations_say_what_the_rule_needs(lm, tmp_path):
    file = tmp_path / "chats.jsonl"
    said = "<think>ice</think><answer>Up</answer>"
    messages = [{"role": "user", "content": "me 0 0"}, {"role": "assistant", "content": said}]
    file.write_text(json.dumps({"messages": messages}))
    proxy = proxy_of(lm)
    with pytest.raises(ValueError, match='has no "success"'):
        learned(proxy, file, rule="success", values=False)
    with pytest.raises(ValueError, match='has no "return"'):
        learned(proxy, file, rule="best", values=False)
    foreign = [{"role": "system", "content": "You are a pirate."}, *messages]
    file.write_text(json.dumps({"messages": foreign}))
    with pytest.raises(
        ValueError, match=r"its system message 'You are a pirate.' is not the run's"
    ):
        learned(proxy, file, values=False)
    messages[1]["content"] = "Up"
    file.write_text(json.dumps({"messages": messages}))
    with pytest.raises(RolloutError, match="no response is learned by turns=valid"):
        learned(proxy, file, turns="valid", values=False)


# ---- before a model is built


def test_records_are_checked_before_there_is_a_model(lm, tmp_path):
    proxy = proxy_of(lm)
    play(proxy, tmp_path / "own")
    write_episodes(
        validation_set(proxy).play_scripted(OptimalPolicy(), name="optimal"), tmp_path / "held_out"
    )
    chats = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    chats.write_text(json.dumps({"messages": messages, "success": True}))

    def check(path, *, environment=ENVIRONMENT, ranks=1, values=True, **records):
        check_records(
            RecordSettings(path=str(path), **records), EnvironmentManager(**environment), states=8,
            template="{observation}", stages=None, learns_values=values, ranks=ranks, seed=0,
        )  # fmt: skip

    check(tmp_path / "own")
    check(tmp_path, held_out="skip")
    check(chats, values=False)
    with pytest.raises(ValueError, match="8 of 20 episodes are of the held-out"):
        check(tmp_path)
    with pytest.raises(ValueError, match="episodes begin in another state"):
        check(tmp_path / "own", environment=ENVIRONMENT | {"kwargs": {"size": 4}})
    with pytest.raises(ValueError, match="12 episodes are fewer than the 13 ranks"):
        check(tmp_path / "own", ranks=13)
    with pytest.raises(ValueError, match=r'the critic learns returns, and .* has no "return"'):
        check(chats)
    with pytest.raises(ValueError, match="none of 12 episodes passes it"):
        check(tmp_path / "own", rule="threshold", threshold=9.0)
    with pytest.raises(ValueError, match="there is no such file or folder"):
        check(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["warm_start.records.rule=threshold"], "warm_start.records.threshold=null: the rule"),
        (["context.window=all", "context.leave_out.turns=0.5"], "context.leave_out: what a prompt"),
        (["env=program", "env.command=[agent]"], "warm_start=records: records of agent programs"),
    ],
)
def test_settings_that_records_do_not_go_with_are_refused(overrides, message):
    given = ["env=frozenlake", "warm_start=records", *overrides]
    node = composed(*given, checked=False)
    node.warm_start.enabled = True
    assert any(text.startswith(message) for text in RecordSettings.config_problems(node, ranks=1))
    node.warm_start.records = None
    assert not list(RecordSettings.config_problems(node, ranks=1))


# ---- resume and ranks


def test_other_records_do_not_continue_a_warm_start(lm, tmp_path):
    proxy = proxy_of(lm)
    play(proxy, tmp_path / "a")
    state = learned(proxy, tmp_path).state_dict()
    learned(proxy, tmp_path).load_state_dict(state)
    with pytest.raises(RolloutError, match="not those that the warm start began with"):
        learned(proxy, tmp_path, rule="success").load_state_dict(state)
    play(proxy, tmp_path / "b", key=1)
    with pytest.raises(RolloutError, match="not those that the warm start began with"):
        learned(proxy, tmp_path).load_state_dict(state)


def fitted(bundle, folder, *, steps, ckpt_path=None, checkpoint=None):
    """Return the weights after some steps of a warm start of eight on the records of a folder."""
    proxy = AgentProxy(
        environments=EnvironmentManager(**ENVIRONMENT), context=ContextManager(bundle, window=2)
    )
    settings = WarmStartSettings(batch_size=8, steps=8)
    data = RecordDataModule(
        proxy, records=RecordSettings(path=str(folder), rule="exponential"), validation_set=None,
        states=8, learns_values=True, settings=settings, seed=0,
    )  # fmt: skip
    torch.manual_seed(0)
    module = WarmStartModule(
        PolicyModule(bundle),
        CriticModule(bundle.hidden_size),
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        settings=settings,
    )
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=steps, max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
    if checkpoint is not None:
        trainer.save_checkpoint(checkpoint)
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_a_warm_start_from_records_is_resumed_exactly(lm, tmp_path):
    play(proxy_of(lm, context={"window": 2}), tmp_path / "played")
    whole = fitted(copy.deepcopy(lm), tmp_path / "played", steps=8)
    file = tmp_path / "warm_start.ckpt"
    half = fitted(copy.deepcopy(lm), tmp_path / "played", steps=4, checkpoint=file)
    resumed = fitted(copy.deepcopy(lm), tmp_path / "played", steps=8, ckpt_path=file)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert any(not torch.equal(whole[name], half[name]) for name in whole)
    edited(tmp_path / "played", lambda record: record["turns"][0].update(reward=0.5))
    with pytest.raises(RolloutError, match="not those that the warm start began with"):
        fitted(copy.deepcopy(lm), tmp_path / "played", steps=8, ckpt_path=file)


@pytest.mark.parametrize("temperature", [0.5, 0.02])
def test_what_an_episode_counts_does_not_depend_on_the_batch_size(lm, tmp_path, temperature):
    proxy = proxy_of(lm)
    play(proxy, tmp_path)
    batch = learned(proxy, tmp_path, rule="exponential", temperature=temperature).batch
    module = WarmStartModule(
        PolicyModule(lm), None, optimizer=partial(torch.optim.AdamW), settings=WarmStartSettings()
    )
    with torch.no_grad():
        scores = module.policy(batch.samples, batch.images, readout=TokenReadout())
    tokens = batch.samples.loss_mask.sum()
    expected = -(scores.logprobs * batch.samples.weight[:, None]).sum() / tokens
    for minibatches in (1, 5, len(batch.samples)):
        steps = MinibatchLoader(batch, epochs=1, minibatches=minibatches)
        for loss in (lambda step: module.losses(step)[0], module.policy.supervised_loss):
            parts = [loss(step).detach() * step.samples.loss_mask.sum() for step in steps]
            assert float(sum(parts) / tokens) == pytest.approx(expected.item(), rel=1e-5)
    assert abs(expected + scores.logprobs.sum() / tokens) > 1e-4


def test_ranks_share_the_episodes(lm, tmp_path, monkeypatch):
    proxy = proxy_of(lm)
    play(proxy, tmp_path)
    whole = learned(proxy, tmp_path, rule="exponential").batch.episodes
    monkeypatch.setattr("ragen_pl.data.records.world_size", lambda: 2)
    for number in range(2):
        monkeypatch.setattr("ragen_pl.data.records.rank", lambda number=number: number)
        own = learned(proxy, tmp_path, rule="exponential").batch.episodes
        for name in ("weight", "group", "success", "turns"):
            assert torch.equal(getattr(own, name), getattr(whole, name)[number::2])
    assert {column.name for column in fields(Episodes)} >= {"weight"}
