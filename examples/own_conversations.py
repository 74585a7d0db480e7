"""PolicyModule in a plain Lightning project: it learns your own conversations by cross-entropy.

This needs no environment, no rollout and no config. Run `python examples/own_conversations.py`.
"""

from __future__ import annotations

import argparse
from functools import partial

import lightning.pytorch as pl
import torch

from ragen_pl.data.conversations import conversation_batch
from ragen_pl.data.loader import MinibatchLoader
from ragen_pl.models.build import build_small_lm
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager

CONVERSATIONS = [
    [
        {"role": "user", "content": f"where is the {thing}?"},
        {"role": "assistant", "content": f"the {thing} is {place}"},
        {"role": "user", "content": "and what is next to it?"},
        {"role": "assistant", "content": f"a {other}"},
    ]
    for thing, place, other in (
        ("goal", "up", "wall"),
        ("box", "down", "hole"),
        ("arm", "left", "box"),
        ("wall", "right", "goal"),
    )
]


class MyConversations(pl.LightningDataModule):
    """DataModule of four short conversations."""

    def __init__(self, context: ContextManager, *, epochs: int) -> None:
        super().__init__()
        self.batch, self.epochs = conversation_batch(CONVERSATIONS, context), epochs

    def train_dataloader(self) -> MinibatchLoader:
        """Return a loader over all conversations."""
        return MinibatchLoader(self.batch, epochs=self.epochs, minibatches=1)


def main(*, epochs: int = 60) -> tuple[float, float]:
    """Train and return the first and the last loss."""
    bundle = build_small_lm(text={"hidden_size": 64, "intermediate_size": 128})
    context = ContextManager(bundle, window="all", system_prompt=None)
    policy = PolicyModule(bundle, optimizer=partial(torch.optim.AdamW, lr=3e-3))
    losses: list[float] = []

    class RecordLoss(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
            losses.append(float(trainer.callback_metrics["train/loss"]))

    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[RecordLoss()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(policy, datamodule=MyConversations(context, epochs=epochs))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=60)
    main(epochs=parser.parse_args().epochs)
