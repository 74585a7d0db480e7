"""ECHO: the environment's text that follows a response is scored, measured and learned, in every layout of samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.episodes.call_trees import after, call, episode
from support.episodes.reference_cases import reference_cases
from support.models.family_models import tiny
from support.models.native_prompts import TOOLS, bundle_of, function_call

from ragen_pl.algorithms.echo import following_text, role_weights, text_loss
from ragen_pl.algorithms.masks import all_text
from ragen_pl.data.batch import Minibatch, TrajectoryBatch
from ragen_pl.data.collate import collate
from ragen_pl.data.loader import MinibatchLoader
from ragen_pl.modules.losses import TextPrediction, UpdateLoss
from ragen_pl.modules.masking import Masks
from ragen_pl.prompts.context import ContextManager
from ragen_pl.trajectory import EpisodeStatus, Observation, Role, Span, Trajectory

ON = TextPrediction(observation=0.5, result=0.25)
# names and marks that the template writes are no text of the environment
RESULTS = ["milk costs 3 <|im_end|> coins", "eggs cost 4 coins"]


@pytest.mark.parametrize("case", reference_cases("echo"))
def test_text_loss_of_the_reference(case: dict) -> None:
    """`role` and `text` [row][time], `alpha` by role."""
    given, expected = case["inputs"], case["outputs"]
    role = torch.tensor(given["role"], dtype=torch.int8)
    marked = following_text(role, torch.tensor(given["text"]), torch.tensor(given["episode"]))
    weight = role_weights(role, marked, {int(key): value for key, value in given["alpha"].items()})
    torch.testing.assert_close(weight, torch.tensor(expected["weight"]))
    assert int((weight > 0).sum()) == expected["count"]
    loss = text_loss(torch.tensor(given["logprobs"]), weight, tokens=expected["count"])
    assert float(loss) == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)


def nudge(agent) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in agent.policy.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)


def shown_texts(agent, batch: TrajectoryBatch) -> list[str]:
    """Return the predicted text of each episode, turn after turn."""
    samples, found = batch.samples, [""] * len(batch.episodes.turns)
    for row in range(len(samples)):
        ids = samples.input_ids[row][samples.text[row] > 0]
        found[int(samples.episode[row])] += agent.policy.bundle.decode(ids.tolist())
    return found


def test_each_observation_after_a_response_is_predicted_once_in_every_layout(make) -> None:
    agent = make.agent(loss=UpdateLoss(echo=ON))
    for window in ("all", 2, 1):
        played = make.play(agent, window=window)
        batch = collate(played, agent.policy.bundle, text=True)
        assert (len(batch.samples) > len(played)) == (window != "all")
        expected = ["".join(turn.observation.text for turn in one.turns[1:]) for one in played]
        if window == 1:  # prompts show no response
            expected = [""] * len(played)
        assert shown_texts(agent, batch) == expected
        assert not (batch.samples.text[batch.samples.turn >= 0] > 0).any()
        assert not collate(played, agent.policy.bundle).samples.text.any()


def cut_before_its_last_turn(one: Trajectory) -> Trajectory:
    last = one.turns[-1]
    return replace(
        one, turns=one.turns[:-1], status=EpisodeStatus.TRUNCATED,
        final_prompt_ids=last.prompt_ids, final_roles=last.prompt_roles,
    )  # fmt: skip


def test_last_observation_of_a_truncated_episode_is_predicted_too(make) -> None:
    agent = make.agent(loss=UpdateLoss(echo=ON))
    played = [one for one in make.play(agent, window="all") if len(one.turns) == 2]
    cut = [cut_before_its_last_turn(one) for one in played]
    whole, ended = (collate(some, agent.policy.bundle, text=True) for some in (played, cut))
    assert shown_texts(agent, ended) == shown_texts(agent, whole) != [""] * len(played)
    assert int(ended.samples.loss_mask.sum()) == sum(
        len(one.turns[0].response_ids) for one in played
    )
    assert ended.final is not None and not ended.final.text.any()
    # a prompt that begins with other ids belongs to none of its samples
    cut[0].final_prompt_ids = cut[0].final_prompt_ids.copy()
    cut[0].final_prompt_ids[0] += 1
    assert shown_texts(agent, collate(cut, agent.policy.bundle, text=True))[0] == ""


def test_text_after_the_last_response_is_of_no_turn(make) -> None:
    masks = Masks(loss=all_text, advantage=all_text, observations=True)
    agent = make.agent(masks=masks, loss=UpdateLoss(echo=ON))
    cut = [cut_before_its_last_turn(one) for one in make.play(agent, window="all")]
    cut = [one for one in cut if one.turns]
    batch = collate(cut, agent.policy.bundle, observations=True, text=True)
    assert batch.samples.turn.amax(1).tolist() == [len(one.turns) - 1 for one in cut]
    assert (batch.samples.spans[batch.samples.turn >= 0] == Span.SHOWN).any()
    assert agent.prepare(batch).samples.text.any()


def test_loss_and_gradient_are_those_of_the_plain_cross_entropy(make) -> None:
    """Beside a policy loss without gradient; at temperature 1, whatever the responses were sampled at."""
    agent = make.agent(loss=UpdateLoss(echo=ON, value_coefficient=0.0))
    batch = make.batch(agent, window="all", temperature=0.7)
    samples = batch.samples
    samples.advantages.zero_()
    nudge(agent)
    loss, gradients = make.gradient(agent, [make.minibatch(batch)])
    bundle = agent.policy.bundle
    agent.zero_grad()
    rows, columns = (samples.text > 0).nonzero(as_tuple=True)
    observed = []
    for row in range(len(samples)):
        ids = samples.input_ids[row, : int(samples.length[row])]
        logits = bundle.model(input_ids=ids[None]).logits[0].float()
        logits[:, list(bundle.banned_token_ids)] = -torch.inf
        nll = -logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        observed.append(nll[columns[rows == row] - 1])
    total = 0.5 * torch.cat(observed).mean()
    total.backward()
    assert loss == pytest.approx(float(total.detach()), rel=1e-5) and loss > 1
    assert agent.statistics.metrics(steps=1)["echo_loss"] == pytest.approx(loss, rel=1e-5)
    own = {name: each.grad for name, each in agent.named_parameters() if each.grad is not None}
    for name, gradient in own.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5)


def test_text_is_measured_without_being_learned(make) -> None:
    loss = {"value_coefficient": 0.5}
    plain = make.agent(loss=UpdateLoss(**loss))
    measured = make.agent(loss=UpdateLoss(echo=TextPrediction(observation=0.0, result=0.0), **loss))
    found = []
    for agent in (plain, measured):
        batch = make.batch(agent, window="all")
        metrics = agent.preparation.compute()
        found.append((*make.gradient(agent, [make.minibatch(batch)]), metrics))
        assert not batch.samples.text.any()
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][name])
    # of an untrained model: near that of the vocabulary
    vocabulary = len(measured.policy.bundle.tokenizer)
    assert found[1][2]["observation_nll"] == pytest.approx(np.log(vocabulary), abs=1.0)
    assert "observation_nll" not in found[0][2] and "result_nll" not in found[1][2]
    assert "echo_loss" not in measured.statistics.metrics(steps=1)


@pytest.mark.parametrize("window", ["all", 2])
def test_gradient_does_not_depend_on_parts_of_a_step(make, window) -> None:
    agent = make.agent(loss=UpdateLoss(echo=ON))
    batch = make.batch(agent, window=window)
    nudge(agent)

    def split(**changes) -> list[Minibatch]:
        return list(MinibatchLoader(batch, epochs=1, minibatches=1, **changes))

    loss, expected = make.gradient(agent, split(length_buckets=1))
    largest = max(float(each.abs().max()) for each in expected.values())
    longest = int(batch.samples.length.max())
    parts = [
        split(accumulate=3), split(accumulate=40), split(tokens_per_microbatch=longest),
        split(length_buckets=3, max_over_ranks=lambda counts: counts + 2),
    ]  # fmt: skip
    for minibatches in parts:
        found, gradients = make.gradient(agent, minibatches)
        assert found == pytest.approx(loss, rel=1e-4)
        for name, gradient in gradients.items():
            assert float((gradient - expected[name]).abs().max()) < 1e-5 * largest, name
    assert float(split()[0].text_tokens) == float((batch.samples.text > 0).sum())
    # logits in chunks, computed again in the backward pass
    agent.policy.logits_mib = 1e-3
    found, gradients = make.gradient(agent, split())
    for name, gradient in gradients.items():
        assert float((gradient - expected[name]).abs().max()) < 1e-5 * largest, name


def test_text_weighs_the_same_however_much_of_it_there_is(make) -> None:
    """The policy's own average does not count it."""
    agent = make.agent(loss=UpdateLoss(echo=TextPrediction(observation=1.0), value_coefficient=0.0))
    batch = make.batch(agent, window="all")
    make.gradient(agent, [make.minibatch(batch)])
    sums = agent.statistics.metrics(steps=1)
    half = batch.samples.text.clone()
    half[::2] = 0
    batch.samples.text = half
    agent.statistics.reset()
    make.gradient(agent, [make.minibatch(batch)])
    fewer = agent.statistics.metrics(steps=1)
    assert fewer["policy_loss"] == pytest.approx(sums["policy_loss"], rel=1e-5)
    assert 0.8 < fewer["echo_loss"] / sums["echo_loss"] < 1.25


def test_a_step_with_text_alone_is_taken(make) -> None:
    agent = make.agent(loss=UpdateLoss(echo=ON, value_coefficient=0.0))
    batch = make.batch(agent, window="all")
    batch.samples.loss_weight.zero_()
    batch.samples.loss_mask.zero_()
    (minibatch,) = MinibatchLoader(batch, epochs=1, minibatches=1)
    assert bool(agent.has_tokens(minibatch)["policy"])
    assert any(gradient.any() for gradient in make.gradient(agent, [minibatch])[1].values())
    batch.samples.text.zero_()
    (minibatch,) = MinibatchLoader(batch, epochs=1, minibatches=1)
    assert not bool(agent.has_tokens(minibatch)["policy"])


def test_batches_of_an_earlier_version_predict_nothing(make) -> None:
    agent = make.agent(loss=UpdateLoss(echo=ON))
    batch = make.batch(agent, window="all")
    state = batch.state_dict()
    same = TrajectoryBatch.from_state_dict(state)
    assert torch.equal(same.samples.text, batch.samples.text) and bool(same.samples.text.any())
    del state["samples"]["text"]
    assert not TrajectoryBatch.from_state_dict(state).samples.text.any()


def test_results_of_tools_have_a_role_of_their_own() -> None:
    context = ContextManager(bundle_of("qwen2_5"), window="all")
    context.record_roles()
    bundle, talk = context.bundle, context.start("Sell.", tools=TOOLS)
    prompt = context.observe(talk, Observation(text="What do you have?"), max_turns=9)

    def shown(role: Role) -> str:
        ids = prompt.ids[len(prompt.ids) - len(prompt.roles) :]
        return bundle.decode(ids[prompt.roles == role].tolist())

    assert prompt.roles[0] != Role.EARLIER and shown(Role.OBSERVATION) == "What do you have?"
    calls = [
        function_call(number, "price", product=name) for number, name in enumerate(["milk", "eggs"])
    ]
    written = talk.native.tools.written(content="", calls=calls, reasoning=None)
    ids = [*bundle.tokenizer(written, add_special_tokens=False)["input_ids"], bundle.end_of_turn_id]
    parsed = talk.native.parse(written, None, max_actions=9)
    talk.respond(ids=np.array(ids), text=written, actions=[], calls=parsed.calls)
    prompt = context.observe(
        talk, Observation(text="\n".join(RESULTS), results=RESULTS), max_turns=9
    )
    assert len(parsed.calls) == 2 and prompt.roles[0] == Role.EARLIER
    assert prompt.ids[len(prompt.ids) - len(prompt.roles)] == bundle.end_of_turn_id
    assert shown(Role.RESULT) == "".join(RESULTS) and shown(Role.OBSERVATION) == ""


def test_what_cannot_tell_text_from_templates_is_refused(make) -> None:
    """A template that rewrites its history before a rollout, and prompts of programs, which are requests."""
    rewrites = ContextManager(tiny("qwen3"), window="all")
    assert not rewrites.joins
    with pytest.raises(ValueError, match=r"echo: this chat template rewrites .*keep_thoughts=true"):
        rewrites.record_roles()
    first = call([20], [30])
    with pytest.raises(ValueError, match=r"echo: a prompt does not say .*echo=null"):
        collate([episode(first, call(after(first, 40), [31]))], make.bundle(), text=True)
