"""An optimizer step without a trained token changes nothing of what it does not train, and is counted."""

from __future__ import annotations

import copy
import functools

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.episodes.trajectories import in_context, make_turn

from ragen_pl.algorithms.masks import sampled
from ragen_pl.data.batch import Minibatch
from ragen_pl.data.collate import collate
from ragen_pl.data.loader import MinibatchDataModule, MinibatchLoader
from ragen_pl.data.settings import UpdateSettings
from ragen_pl.loops.rollout_update import RolloutUpdate
from ragen_pl.modules.critic import CriticModule
from ragen_pl.modules.masking import Masks
from ragen_pl.modules.optimizers import module_name
from ragen_pl.modules.policy import PolicyModule

GROUPS = ("policy", "critic")
QUIET = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "logger": False,
}


class Watch(pl.Callback):
    """Keep the tokens of each optimizer step, and the groups of weights and moments that it changed."""

    def __init__(self) -> None:
        self.tokens: list[tuple[bool, ...]] = []
        self.changed: list[set[str]] = []

    def state(self, trainer: pl.Trainer) -> dict[str, list[torch.Tensor]]:
        (optimizer,) = trainer.optimizers
        state: dict[str, list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for weight in group["params"]:
                moments = optimizer.state.get(weight, {}).values()
                tensors = [weight, *map(torch.as_tensor, moments)]
                state.setdefault(module_name(group), []).extend(copy.deepcopy(tensors))
        return state

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        self.before = self.state(trainer)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch: Minibatch, *_) -> None:
        if not trainer.fit_loop._should_accumulate():
            self.tokens.append(tuple(batch.counted.tolist()))
            after = self.state(trainer)
            same = {
                name: len(after[name]) == len(before) and all(map(torch.equal, after[name], before))
                for name, before in self.before.items()
            }
            self.changed.append({name for name, is_same in same.items() if not is_same})


def nothing(spans: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(spans, dtype=torch.bool)


def first_two_episodes(spans: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    return sampled(spans, turn) & (torch.arange(len(spans)) < 2)[:, None]


def fit(
    agent, datamodule, *, minibatches: int, accumulate: int = 1
) -> tuple[Watch, dict[str, float]]:
    """Run two iterations of two epochs; return what the steps changed, and the last iteration's empty steps."""
    datamodule.update = UpdateSettings(epochs=2, minibatches=minibatches)
    watch = Watch()
    trainer = pl.Trainer(
        **QUIET, max_epochs=2, gradient_clip_val=1.0, limit_val_batches=0, accumulate_grad_batches=accumulate,
        callbacks=[RolloutUpdate(), watch],
    )  # fmt: skip
    trainer.fit(agent, datamodule=datamodule)
    metrics = trainer.callback_metrics
    return watch, {name: float(metrics[f"update/empty_steps_{name}"]) for name in GROUPS}


@pytest.mark.parametrize(
    ("own_critic", "accumulate", "clip_norm"),
    [(False, 1, None), (True, 1, None), (False, 2, None), (True, 2, 1.0)],
    ids=["shared trunk", "own trunk", "two parts of a step", "a norm of the divergence"],
)
def test_more_minibatches_than_samples(setup_of, accumulate, own_critic, clip_norm):
    """12 episodes as 12 samples, one a window of the whole episode, in 16 minibatches."""
    kl = {"clip_norm": clip_norm}
    setup = setup_of(window="all", weight_decay=0.1, own_critic=own_critic, kl=kl)
    watch, empty = fit(*setup.build(), minibatches=16, accumulate=accumulate)
    trained = [step[0] for step in watch.tokens]
    assert trained == 4 * ([True] * 12 + [False] * 4)
    assert watch.changed == [set(GROUPS) if step else set() for step in trained]
    assert empty == {"policy": 8.0, "critic": 8.0}


def test_samples_without_trained_tokens_are_spread(setup_of):
    """Two episodes of twelve have tokens in M_loss; all have tokens of the critic, which has its own trunk."""
    setup = setup_of(window="all", weight_decay=0.1, own_critic=True, kl={"coefficient": 0.0})
    agent, datamodule = setup.build()
    agent.masks = Masks(loss=first_two_episodes)
    watch, empty = fit(agent, datamodule, minibatches=3)
    # those two are in two of three minibatches, and every minibatch has samples of the critic
    assert watch.changed == 4 * [set(GROUPS), set(GROUPS), {"critic"}]
    assert empty == {"policy": 2.0, "critic": 0.0}


@pytest.mark.parametrize(
    "masks, kl, value, own, changed",
    [
        (Masks(loss=nothing), 0.0, 0.5, True, {"critic"}),
        # the value loss trains the trunk, and so does the divergence
        (Masks(loss=nothing), 0.0, 0.5, False, {"policy", "critic"}),
        (Masks(loss=nothing), 0.1, 0.5, True, {"policy", "critic"}),
        (Masks(), 0.0, 0.0, False, {"policy"}),
        (Masks(loss=nothing), 0.0, 0.0, False, set()),
    ],
    ids=["critic alone", "shared trunk", "divergence", "policy alone", "neither"],
)
def test_policy_and_critic_each_train_by_their_own_tokens(setup_of, masks, kl, value, own, changed):
    """Fully masked responses, in all steps."""
    setup = setup_of(window="all", weight_decay=0.1, own_critic=own, kl={"coefficient": kl})
    agent, datamodule = setup.build()
    agent.masks, agent.loss.value_coefficient = masks, value
    watch, empty = fit(agent, datamodule, minibatches=2)
    assert watch.changed == [changed] * 8
    assert empty == {name: 4.0 * (name not in changed) for name in GROUPS}


def batch_of(bundle, *kinds: int):
    """Return samples with tokens in M_loss (0), for the critic alone (1), and without any (2)."""
    turns = [
        make_turn(response_ids=torch.tensor([7, bundle.end_of_turn_id]).numpy()) for _ in kinds
    ]
    made = [in_context(bundle, [turn], window="all", group=n) for n, turn in enumerate(turns)]
    batch = collate(made, bundle)
    for row, kind in enumerate(kinds):
        if kind > 0:
            batch.samples.loss_mask[row] = batch.samples.kl_mask[row] = False
            batch.samples.loss_weight[row] = 0
        if kind > 1:
            batch.samples.advantage_mask[row] = False
    return batch


@settings(max_examples=40, derandomize=True)
@given(
    st.lists(
        st.lists(st.sampled_from([0, 0, 1, 2]), min_size=1, max_size=9), min_size=1, max_size=3
    ),
    st.integers(1, 9),
    st.integers(1, 2),
)
def test_few_steps_are_empty_on_any_number_of_ranks(lm, ranks, minibatches, accumulate):
    batches = [batch_of(lm, *kinds) for kinds in ranks]
    counts = [[kinds.count(kind) for kind in range(3)] for kinds in ranks]
    steps = []
    for rank, batch in enumerate(batches):
        loader = MinibatchLoader(
            batch, epochs=1, minibatches=minibatches, accumulate=accumulate, seed_key=(0, rank), rank=rank,
            gather_over_ranks=lambda own: counts,
        )  # fmt: skip
        yielded = list(loader)
        assert len(yielded) == minibatches * accumulate
        assert sum(int((part.samples.weight > 0).sum()) for part in yielded) == len(batch.samples)
        steps.append([yielded[n : n + accumulate] for n in range(0, len(yielded), accumulate)])
    numbers = [
        [
            sum(column(part) for rank in steps for part in rank[number])
            for number in range(minibatches)
        ]
        for column in (
            lambda part: int((part.samples.loss_mask.any(1)).sum()),
            lambda part: int((part.samples.weight > 0).sum()),
        )
    ]
    # samples with tokens, and all samples, are as evenly spread as on one rank
    assert all(max(of_steps) - min(of_steps) <= 1 for of_steps in numbers)
    trained = [number > 0 for number in numbers[0]]
    assert trained == sorted(trained, reverse=True)


@pytest.mark.parametrize("name", GROUPS)
def test_a_module_trained_alone_leaves_empty_steps(setup_of, lm, name):
    bundle = setup_of().bundle()
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    module: pl.LightningModule
    if name == "policy":
        module = PolicyModule(bundle, optimizer=optimizer)
    else:
        module = CriticModule(bundle.hidden_size, backbone=bundle, optimizer=optimizer)

    class Data(MinibatchDataModule):
        def train_dataloader(self) -> MinibatchLoader:
            batch = batch_of(lm, 0, 0)
            batch.samples.returns += batch.samples.loss_mask.float()
            return self.minibatches_of(batch, epochs=2, minibatches=4, seed_key=(0,))

    watch = Watch()
    trainer = pl.Trainer(**QUIET, max_epochs=1, callbacks=[watch])
    trainer.fit(module, datamodule=Data(UpdateSettings()))
    assert watch.changed == 2 * [{""}, {""}, set(), set()]  # its groups have no names
    assert module.empty_steps == {name: 4}


def test_a_step_of_whole_batches_is_empty_if_all_of_them_are(setup_of, lm):
    module = PolicyModule(setup_of().bundle())
    batches = [batch_of(lm, kind) for kind in (0, 2, 2, 0, 2, 2)]
    loader = torch.utils.data.DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)
    before = copy.deepcopy(module.model.state_dict())
    trainer = pl.Trainer(**QUIET, max_epochs=1, max_steps=1, accumulate_grad_batches=2)
    trainer.fit(module, loader)
    now = module.model.state_dict()
    assert any(not torch.equal(weight, now[name]) for name, weight in before.items())
    pl.Trainer(**QUIET, max_epochs=1, accumulate_grad_batches=2).fit(module, loader)
    assert module.empty_steps == {"policy": 1}


def test_a_schedule_by_steps_does_not_count_an_empty_one(warm_start, lm):
    module, _ = warm_start(steps=10)

    class Data(MinibatchDataModule):
        def train_dataloader(self) -> MinibatchLoader:
            return self.minibatches_of(batch_of(lm, 0, 0), epochs=2, minibatches=4, seed_key=(0,))

    trainer = pl.Trainer(**QUIET, max_epochs=1)
    trainer.fit(module, datamodule=Data(UpdateSettings()))
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 4
    assert module.empty_steps == {"policy": 4}
