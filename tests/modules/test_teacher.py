"""On-policy distillation: the policy learns the distribution of another model of its tokenizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from support.models.tiny_models import TEXT, VISION

from ragen_pl.algorithms.advantages.teacher_ratio import TeacherRatio, UnlikelyTokens
from ragen_pl.algorithms.aggregation import Aggregation
from ragen_pl.algorithms.kl import DivergenceWeights, full_kl, kl_estimate
from ragen_pl.algorithms.masks import sampled
from ragen_pl.assembly.teacher import Teacher
from ragen_pl.config import ConfigError
from ragen_pl.data.loader import MinibatchLoader
from ragen_pl.models.adapters import choose_trained_weights
from ragen_pl.models.build import build_small_lm, build_small_vlm
from ragen_pl.models.distribution import log_distribution
from ragen_pl.modules.frozen import fingerprints, frozen_problem, without_frozen
from ragen_pl.modules.losses import ReferenceKL, UpdateLoss

LARGER = TEXT | {"hidden_size": 48, "num_hidden_layers": 3}


def save(bundle, folder: Path) -> str:
    bundle.save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A larger model than the policy."""
    return save(build_small_lm(seed=7, text=LARGER), tmp_path_factory.mktemp("teacher"))


def distillation(path: str, *, estimator: str = "full_reverse", **changes) -> UpdateLoss:
    settings = {"aggregation": Aggregation.TOKEN_MEAN, "mask": sampled} | changes
    penalty = ReferenceKL(
        coefficient=1.0, estimator=estimator, reference=Teacher(path=path), **settings
    )
    return UpdateLoss(policy_coefficient=0.0, value_coefficient=0.0, whiten=False, kl=penalty)


def plain_divergence(agent, samples, *, estimator: str) -> torch.Tensor:
    """Return the divergence at each sampled token, row after row, from the logits of both models."""
    bundle, found = agent.policy.bundle, []
    for row in range(len(samples)):
        ids = samples.input_ids[row : row + 1, : int(samples.length[row])]
        at = (samples.turn[row] >= 0).nonzero().flatten()
        own, teacher = (
            log_distribution(
                model(ids).logits[0, at - 1, : bundle.logit_count],
                temperature=samples.temperature[row, at][:, None],
                banned=bundle.banned(ids.device),
            )
            for model in (agent.policy.model, agent.reference.model)
        )
        if estimator == "full_reverse":
            found.append(full_kl(own, teacher))
        elif estimator == "full":
            found.append(full_kl(teacher, own))
        else:
            pair = [one.gather(-1, ids[0, at][:, None]).squeeze(-1) for one in (own, teacher)]
            found.append(kl_estimate(*pair, how=estimator))
    return torch.cat(found)


@pytest.mark.parametrize("estimator", ["full_reverse", "full", "k2"])
def test_a_teacher_of_another_size_scores_the_policys_tokens(make, folder, estimator) -> None:
    agent = make.agent(loss=distillation(folder, estimator=estimator))
    batch = make.batch(agent, temperature=0.7)
    width = [] if estimator == "k2" else [48]
    assert list(batch.reference.shape[1:]) == width
    with torch.no_grad():
        expected = plain_divergence(agent, batch.samples, estimator=estimator)
    assert expected.mean() > 0.01
    loss, gradients = make.gradient(agent, [make.minibatch(batch)])
    assert loss == pytest.approx(float(expected.mean()), rel=1e-4)
    assert any(gradient.any() for gradient in gradients.values())
    assert not any(name.startswith("reference.") for name in gradients)


@pytest.mark.parametrize("packs", [True, False, None])
def test_a_teacher_packs_rows_as_the_policy_does(make, folder, packs) -> None:
    def choose(bundle) -> None:
        bundle.packs_rows = packs

    agent = make.agent(loss=distillation(folder), change=choose)
    assert agent.reference.bundle.packs_rows is packs


@pytest.mark.parametrize("of", ["policy", "reference"])
def test_a_divergence_falls_with_the_tokens_that_it_tells_apart(make, folder, of) -> None:
    losses = []
    for count in (None, 10_000, 8, 1):
        agent = make.agent(loss=distillation(folder, top_k=count, top_k_of=of))
        losses.append(make.gradient(agent, [make.minibatch(make.batch(agent))])[0])
    every, larger, some, one = losses
    assert larger == pytest.approx(every, rel=1e-5) and every > 1.01 * some > 1.01 * one > 0


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_gradient_is_the_plain_one_however_the_samples_are_split(make, folder, lora) -> None:
    def adapt(bundle) -> None:
        if lora is not None:
            choose_trained_weights(bundle.model, lora=lora)

    agent = make.agent(loss=distillation(folder), change=adapt)
    batch = make.batch(agent, window="all")
    agent.zero_grad()
    plain_divergence(agent, batch.samples, estimator="full_reverse").mean().backward()
    expected = {
        name: weight.grad.clone()
        for name, weight in agent.named_parameters()
        if weight.grad is not None
    }
    assert expected and all(name.startswith("policy.") for name in expected)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 1e-3
    longest = int(batch.samples.length.max())
    for changes in ({}, {"accumulate": 3}, {"tokens_per_microbatch": longest}, {"accumulate": 40}):
        split = list(MinibatchLoader(batch, epochs=1, minibatches=1, **changes))
        _, found = make.gradient(agent, split)
        assert found.keys() >= expected.keys()
        for name, gradient in found.items():  # of the critic: 0
            difference = gradient - expected.get(name, torch.zeros_like(gradient))
            assert float(difference.abs().max()) < 2e-5 * largest, name


def test_weights_of_turns_and_confidence_however_the_samples_are_split(make, folder) -> None:
    weights = DivergenceWeights(turn_decay=0.5)
    agent = make.agent(loss=distillation(folder, weights=weights))
    batch = make.batch(agent, window="all", temperature=0.7)
    bundle, samples, entropies, turns = agent.policy.bundle, batch.samples, [], []
    with torch.no_grad():
        each = plain_divergence(agent, samples, estimator="full_reverse")
        for row in range(len(samples)):
            at = (samples.turn[row] >= 0).nonzero().flatten()
            ids = samples.input_ids[row : row + 1, : int(samples.length[row])]
            log_q = log_distribution(
                agent.reference.model(ids).logits[0, at - 1, : bundle.logit_count],
                temperature=samples.temperature[row, at][:, None],
                banned=bundle.banned(ids.device),
            )
            entropies.append(-(log_q.exp() * log_q).sum(-1))
            turns.append(samples.turn[row, at])
    allowed = int((log_q[0].exp() > 0).sum())
    raw = 0.5 ** torch.cat(turns) * (1 - torch.cat(entropies) / torch.tensor(allowed).log())
    weight = raw / raw.mean()
    assert weight.max() > 1.5 * weight.min() > 0
    loss, _ = make.gradient(agent, [make.minibatch(batch)])
    assert loss == pytest.approx(float((weight * each).mean()), rel=1e-4)
    plain, _ = make.gradient(agent, [replace(make.minibatch(batch), kl_weight=None)])
    assert abs(plain - loss) > 1e-3
    for changes in ({"accumulate": 3}, {"tokens_per_microbatch": int(samples.length.max())}):
        split = list(MinibatchLoader(batch, epochs=1, minibatches=1, **changes))
        assert make.gradient(agent, split)[0] == pytest.approx(loss, rel=1e-4)
    # the plain divergence is shown, by turn
    result = agent.loss(agent.scorer.score_minibatch(make.minibatch(batch)), make.minibatch(batch))
    for turn in range(3):
        of_turn = each[torch.cat(turns) == turn]
        assert float(result.sums[f"kl_turn_{turn + 1}"]) == pytest.approx(
            float(of_turn.sum()), rel=1e-4
        )
        assert int(result.sums[f"kl_tokens_turn_{turn + 1}"]) == len(of_turn) > 0


def test_a_mean_over_the_tokens_of_a_sample_keeps_the_weights_of_turns(make, folder) -> None:
    """A sample is a turn here, whose tokens have one weight."""
    weights = DivergenceWeights(turn_decay=0.5, confidence=False)
    how = Aggregation.SEQ_MEAN_TOKEN_MEAN
    agent = make.agent(loss=distillation(folder, weights=weights, aggregation=how))
    batch = make.batch(agent, window=1)
    samples = batch.samples
    lengths = (samples.turn >= 0).sum(1)
    with torch.no_grad():
        each = plain_divergence(agent, samples, estimator="full_reverse").split(lengths.tolist())
    decay = 0.5 ** samples.turn.amax(1)
    weight = decay * lengths.sum() / (decay * lengths).sum()
    assert weight.max() == 4 * weight.min()
    expected = (weight * torch.stack([own.mean() for own in each])).mean()
    loss, _ = make.gradient(agent, [make.minibatch(batch)])
    assert loss == pytest.approx(float(expected), rel=1e-4)
    plain, _ = make.gradient(agent, [replace(make.minibatch(batch), kl_weight=None)])
    assert abs(plain - loss) > 1e-3


def test_the_teachers_ratio_is_the_advantage_of_each_sampled_token(make, folder) -> None:
    penalty = ReferenceKL(
        coefficient=0.5, estimator="k1", place="reward", bound=0.1, mask=sampled, reference=Teacher(path=folder)
    )  # fmt: skip
    loss = UpdateLoss(value_coefficient=0.0, whiten=False, kl=penalty)
    agent = make.agent(loss=loss, estimator=TeacherRatio(discount=0.5))
    batch = make.batch(agent, temperature=0.7)
    with torch.no_grad():
        ratio = -plain_divergence(agent, batch.samples, estimator="k1")
    own = 0.5 * ratio.clamp(-0.1, 0.1)
    assert (own.abs() < 0.049).any() and (own == 0.05).any() and (own == -0.05).any()
    at = batch.samples.turn >= 0
    number, episode = batch.samples.token[at], batch.samples.episode[:, None].expand(at.shape)[at]
    expected = torch.zeros_like(own)
    for token in reversed(number.argsort().tolist()):
        after = (number == number[token] + 1) & (episode == episode[token])
        expected[token] = own[token] + 0.5 * expected[after].sum()
    torch.testing.assert_close(batch.samples.advantages[at], expected, rtol=1e-4, atol=1e-6)


def test_the_policys_own_distribution_teaches_nothing(make, tmp_path) -> None:
    path = save(make.bundle(seed=0), tmp_path)
    agent = make.agent(loss=distillation(path))
    loss, gradients = make.gradient(agent, [make.minibatch(make.batch(agent))])
    assert abs(loss) < 1e-6
    assert all(gradient.abs().max() < 1e-6 for gradient in gradients.values())


def test_the_control_without_a_teacher_punishes_unlikely_tokens_alone(make) -> None:
    loss = UpdateLoss(value_coefficient=0.0, whiten=False)
    agent = make.agent(loss=loss, estimator=UnlikelyTokens(below=0.002))
    batch = make.batch(agent)
    at = batch.samples.turn >= 0
    probability = batch.samples.rollout_logprobs[at].exp()
    found = batch.samples.advantages[at]
    assert torch.equal(found, -(probability < 0.002).float()) and 0 < -found.mean() < 1
    assert not batch.samples.advantages[~at].any()


@pytest.mark.parametrize(("own", "others"), [(0, 5), (5, 0), (2, 5)])
def test_padded_vocabularies_change_nothing(make, tmp_path, own, others) -> None:
    """Rows of the head without a token, of the policy's and of the teacher's model."""

    def pad(bundle, rows: int):
        if rows:
            bundle.model.resize_token_embeddings(bundle.logit_count + rows, mean_resizing=False)
        return bundle

    losses = []
    for policy, teacher in ((0, 0), (own, others)):
        bundle = pad(build_small_lm(seed=7, text=LARGER), teacher)
        path = save(bundle, tmp_path / f"{policy}_{teacher}")
        agent = make.agent(
            loss=distillation(path), change=lambda bundle, rows=policy: pad(bundle, rows)
        )
        assert agent.reference.bundle.logit_count == agent.policy.bundle.logit_count
        losses.append(make.gradient(agent, [make.minibatch(make.batch(agent))])[0])
    assert losses[0] > 0.01 and losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_another_tokenizer_is_refused_with_the_id(make, tmp_path) -> None:
    words = ["left", "right"]
    path = save(build_small_lm(text=TEXT, words=words), tmp_path / "teacher")
    for reader in (Teacher(path=path).check, lambda bundle: make.agent(loss=distillation(path))):
        reader(make.bundle())  # further words of the teacher are no ids of the policy
    policy = build_small_lm(text=TEXT, words=["up", "down"])
    with pytest.raises(ConfigError, match=r"reference\.path=.*: id \d+ is .*up.* and .*left.* to"):
        Teacher(path=path).check(policy)
    policy = build_small_lm(text=TEXT, words=[*words, "up"])
    with pytest.raises(ConfigError, match=r"is ' up' to the policy, and no token to it, .* give"):
        Teacher(path=path).check(policy)


def test_a_teacher_that_sees_images_in_another_way_is_refused(make, folder, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"reference\.path=.*: its token of an image is another"):
        make.agent(loss=distillation(folder), images=True)
    path = save(build_small_vlm(seed=7, text=LARGER, vision=VISION), tmp_path)
    agent = make.agent(loss=distillation(path), images=True)
    loss, _ = make.gradient(agent, [make.minibatch(make.batch(agent, groups=2))])
    assert loss > 0.01


def test_what_is_no_teacher_is_refused_before_a_model_is_read(tmp_path) -> None:
    key = r"algorithm\.loss\.kl\.reference\.path="
    for place, reason in (
        (tmp_path / "none", "there is no such file or folder; give a checkpoint"),
        (tmp_path, "holds no model"),
        (Path(__file__), r"no run's config\.yaml next to it"),
    ):
        with pytest.raises(ConfigError, match=f"{key}{place}: .*{reason}"):
            Teacher(path=str(place))


def test_checkpoints_hold_a_fingerprint_of_the_teacher_in_place_of_its_weights(
    make, folder, tmp_path
) -> None:
    agent = make.agent(loss=distillation(folder))
    assert not any(
        name.startswith("reference.") for name in without_frozen(agent, agent.state_dict())
    )
    saved = fingerprints(agent)
    assert frozen_problem(saved, fingerprints(make.agent(loss=distillation(folder)))) is None
    other = save(build_small_lm(seed=8, text=LARGER), tmp_path)
    problem = frozen_problem(saved, fingerprints(make.agent(loss=distillation(other))))
    assert problem is not None and "algorithm.loss.kl.reference.path" in problem


def test_settings_of_somebody_else_are_checked_as_elsewhere(tmp_path) -> None:
    settings = {"model": {"build": {"_target_": "their.module.build"}}, "env": {"target": "bandit"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings | {"rollout": {}}))
    (tmp_path / "checkpoints").mkdir()
    torch.save({"state_dict": {}}, tmp_path / "checkpoints" / "last.ckpt")
    with pytest.raises(
        ConfigError, match=r"model\.build\._target_=their\.module\.build names code"
    ):
        Teacher(path=str(tmp_path))
    assert Teacher(path=str(tmp_path), trust=True)


def test_a_teacher_of_several_checkpoints_has_the_mean_of_their_weights(make, tmp_path) -> None:
    settings = {
        "model": {"build": {"_target_": "ragen_pl.models.build.build_small_lm", "text": LARGER}},
        "env": {"target": "ragen_pl.envs:ragen/FrozenLake-v0", "prompt_format": "free_think"},
        "rollout": {},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "checkpoints").mkdir()
    files, weights = [], []
    for seed in (7, 8, 9):
        model = build_small_lm(seed=seed, text=LARGER).model
        state = {f"policy.model.{name}": weight for name, weight in model.state_dict().items()}
        files.append(str(tmp_path / "checkpoints" / f"{seed}.ckpt"))
        torch.save({"state_dict": state}, files[-1])
        weights.append(dict(model.named_parameters()))
    teacher = Teacher(path=files[0], average=files[1:], trust=True).build(make.agent().policy)
    own = dict(teacher.model.named_parameters())
    assert own.keys() == weights[0].keys()
    for name, found in own.items():
        mean = torch.stack([one[name].detach() for one in weights]).mean(0)
        torch.testing.assert_close(found, mean[: len(found)])
    with pytest.raises(ConfigError, match=r"reference\.average=.*none\.ckpt is no file; give chec"):
        Teacher(path=files[0], average=[str(tmp_path / "none.ckpt")], trust=True)
    other = build_small_lm(text=TEXT).model.state_dict()
    torch.save(
        {"state_dict": {f"policy.model.{name}": one for name, one in other.items()}}, files[2]
    )
    with pytest.raises(ConfigError, match=r"9\.ckpt"):
        Teacher(path=files[0], average=files[2:], trust=True).build(make.agent().policy)


def test_checkpoints_are_not_averaged_with_a_folder(folder) -> None:
    with pytest.raises(ConfigError, match=r"reference\.average: .* is a Hugging Face folder; give"):
        Teacher(path=folder, average=[str(Path(__file__))])
