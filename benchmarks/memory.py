"""Peak memory of an update step, against the plain way; its growth; and the bytes of a token in the KV cache.

    python benchmarks/memory.py

The step is the forward and backward pass of one minibatch with a divergence over the whole vocabulary. The plain way
computes all rows in one forward pass, all logits at once by autograd, keeps every activation, and keeps the reference's
log-probs of the whole vocabulary. The trainer's way is that of `update.tokens_per_microbatch`,
`update.gradient_checkpointing` and `update.logits_mib`. Both give the same loss and gradients.

The decoder is tiny and the vocabulary is that of a real model, so logits take most of the memory, as they do at size.
The samples are random. A peak is the largest number of bytes that torch's CPU allocator had handed out during the
step, beyond the weights; torch's profiler reports each allocation.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from ragen_pl.algorithms.kl import full_kl
from ragen_pl.data.batch import Episodes, Minibatch, Samples, TrajectoryBatch
from ragen_pl.data.loader import MinibatchLoader
from ragen_pl.data.settings import UpdateSettings
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.distribution import entropy
from ragen_pl.modules.forward import sampled_states
from ragen_pl.modules.losses import ReferenceKL, UpdateLoss
from ragen_pl.modules.policy import PolicyModule, StateReadout, TokenScores
from ragen_pl.modules.reference import FrozenCopy
from ragen_pl.modules.scorer import Scorer

TARGET = 5.0
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Sizes of a step."""

    rows: int = 8
    length: int = 256
    vocabulary: int = 151_936

    @property
    def sampled(self) -> int:
        """Sampled tokens of a row."""
        return self.length // 8


def peak_bytes(run: Callable[[], Result]) -> tuple[Result, int]:
    """Return what a function returns, and the most bytes that it had allocated on the CPU at a time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    now = peak = 0
    for _, change in sorted(changes, key=lambda change: change[0]):
        now += change
        peak = max(peak, now)
    return result, peak


# ---- model and samples


def build_bundle(vocabulary: int) -> ModelBundle:
    """Return a tiny decoder with a large vocabulary, whose head shares the embeddings' weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(vocabulary)}, "w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():  # else all tokens are about as probable
        model.get_output_embeddings().weight.mul_(10.0)
    return ModelBundle(model, tokenizer)


def build_batch(size: Size) -> TrajectoryBatch:
    """Return random samples of half to the whole length, each of one turn that ends with the sampled tokens."""
    generator = torch.Generator().manual_seed(1)
    shape = (size.rows, size.length)
    lengths = torch.linspace(size.length // 2, size.length, size.rows).long()
    place, end = torch.arange(size.length)[None, :], lengths[:, None]
    sampled = (place < end) & (place >= end - size.sampled)
    samples = Samples.of_one_turn(
        torch.randint(2, size.vocabulary, shape, generator=generator),
        sampled,
        length=lengths,
        image_index=torch.zeros(size.rows, 0, dtype=torch.int64),
        advantages=torch.randn(shape, generator=generator),
    )
    column, table = torch.zeros(size.rows), torch.zeros(size.rows, 1)
    episodes = Episodes(
        turn_rewards=table,
        turns=column.long() + 1,
        group=column.long(),
        member=torch.arange(size.rows),
        hit_length_limit=table.bool(),
        state=table.long(),
        final_state=column.long(),
        potential=table,
        final_potential=column,
        advances=table == 0,
        success=column.char(),
        terms=table.double(),
        environment=column.long(),
        weight=column + 1,
        truncated=column.bool(),
        bootstrap=column,
    )
    return TrajectoryBatch(samples=samples, episodes=episodes, images=[], terms=("environment",))


# ---- both ways


@dataclass(slots=True)
class Step:
    """Results of a step."""

    loss: float
    gradients: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class PlainReadout:
    """Scores with all logits at once, by autograd."""

    reference: Tensor

    def __call__(
        self,
        bundle: ModelBundle,
        samples: Samples,
        images: Sequence[Tensor],
        microbatches: Sequence[Tensor],
    ) -> TokenScores:
        """Return the scores."""
        (states,) = sampled_states(bundle, samples, images, microbatches)
        at = (states.rows, states.columns)
        log_probs = bundle.log_probs(states.hidden, temperature=samples.temperature[at][:, None])
        parts = (
            log_probs.gather(-1, samples.input_ids[at][:, None]).squeeze(-1),
            entropy(log_probs),
            full_kl(self.reference[samples.token[at]], log_probs),
        )
        logprobs, entropies, kl = (
            torch.zeros(samples.input_ids.shape).index_put(at, part) for part in parts
        )
        return TokenScores(logprobs, entropies, kl=kl)


class Steps:
    """The same step both ways.

    Args:
        size: Sizes of the step.
        logits_mib: `update.logits_mib`.
        tokens_per_microbatch: `update.tokens_per_microbatch`.
    """

    def __init__(self, size: Size, *, logits_mib: float, tokens_per_microbatch: int) -> None:
        self.tokens_per_microbatch = tokens_per_microbatch
        self.batch = build_batch(size)
        self.policy = PolicyModule(
            build_bundle(size.vocabulary), update=UpdateSettings(logits_mib=logits_mib)
        )
        self.reference = FrozenCopy().build(self.policy)
        self.loss = UpdateLoss(kl=ReferenceKL(coefficient=0.1))
        generator = torch.Generator().manual_seed(2)
        samples = self.batch.samples
        with torch.no_grad():  # off the reference, so that the divergence has a gradient
            for weight in self.policy.parameters():
                weight.add_(0.01 * torch.randn(weight.shape, generator=generator))
            rows = list(torch.arange(size.rows).split(1))
            logprobs = self.policy.eval()(samples, [], microbatches=rows).logprobs
            noise = 0.1 * torch.randn(logprobs.shape, generator=generator)
            samples.rollout_logprobs = samples.old_logprobs = torch.where(
                samples.turn >= 0, logprobs + noise, 0.0
            )

    def plain(self) -> Step:
        """Take the plain step."""
        (minibatch,) = MinibatchLoader(self.batch, epochs=1, minibatches=1, length_buckets=1)
        model = self.policy.bundle.model
        if hasattr(model, "activation_checkpointing_disable"):
            model.activation_checkpointing_disable()
        else:  # its name before transformers 5.23
            model.gradient_checkpointing_disable()
        with torch.no_grad():
            (states,) = sampled_states(
                self.reference.bundle,
                self.batch.samples,
                [],
                [torch.arange(len(self.batch.samples))],
            )
            # all temperatures are 1
            reference = self.reference.bundle.log_probs(states.hidden)
            order = self.batch.samples.token[states.rows, states.columns]
            assert torch.equal(order, torch.arange(len(order)))
        scores = self.policy.train()(
            minibatch.samples,
            [],
            microbatches=minibatch.microbatches,
            readout=PlainReadout(reference),
        )
        # the scores hold the divergence; the loss asks the minibatch whether there is one
        return self._backward([(scores, replace(minibatch, reference=reference))])

    def lean(self) -> Step:
        """Take the trainer's step."""
        self.policy.bundle.checkpoint_layers()
        rows = list(torch.arange(len(self.batch.samples)).split(1))
        with torch.no_grad():
            states = self.reference(
                self.batch.samples, [], microbatches=rows, readout=StateReadout()
            )
        loader = MinibatchLoader(
            replace(self.batch, reference=states),
            epochs=1,
            minibatches=1,
            tokens_per_microbatch=self.tokens_per_microbatch,
        )
        self.policy.train()
        scorer = Scorer(self.policy, None, self.reference, self.loss)
        return self._backward((scorer.score_minibatch(part), part) for part in loader)

    def _backward(self, parts: Iterable[tuple[TokenScores, Minibatch]]) -> Step:
        """Run the backward pass of each part, one after the other."""
        total = 0.0
        for scores, minibatch in parts:
            loss = self.loss(scores, minibatch).loss
            loss.backward()
            total += float(loss.detach())
            del scores, loss
        gradients = {}
        for name, weight in self.policy.named_parameters():
            assert weight.grad is not None
            gradients[name], weight.grad = weight.grad, None
        return Step(total, gradients)


def difference(first: Step, second: Step) -> tuple[float, float]:
    """Return the difference of two losses, and the largest of the gradients as a share of the largest gradient."""
    largest = max(float(gradient.abs().max()) for gradient in first.gradients.values())
    gap = max(
        float((gradient - second.gradients[name]).abs().max())
        for name, gradient in first.gradients.items()
    )
    return abs(first.loss - second.loss), gap / largest


# ---- tables


def mib(count: float) -> str:
    """Return bytes in MiB."""
    return f"{count / 2**20:,.0f}"


def compare(size: Size, args: argparse.Namespace, table: Table, name: str) -> float:
    """Add a row with both peaks to a table and return their ratio.

    Raises:
        SystemExit: The two ways do not give the same loss and gradients.
    """
    steps = Steps(
        size, logits_mib=args.logits_mib, tokens_per_microbatch=args.tokens_per_microbatch
    )
    plain, plain_peak = peak_bytes(steps.plain)
    lean, lean_peak = peak_bytes(steps.lean)
    loss_gap, gradient_gap = difference(plain, lean)
    if loss_gap > 1e-4 or gradient_gap > 1e-4:
        raise SystemExit(f"the two ways differ: loss {loss_gap:.1e}, gradients {gradient_gap:.1e}")
    table.add_row(
        name,
        f"{size.rows * size.sampled:,}",
        mib(plain_peak),
        mib(lean_peak),
        f"{plain_peak / lean_peak:.1f}",
        f"{loss_gap:.0e}",
        f"{gradient_gap:.0e}",
    )
    return plain_peak / lean_peak


def compare_sizes(args: argparse.Namespace, console: Console) -> float:
    """Print the peaks at several sizes and return the ratio at the first."""
    table = Table(
        "step", "sampled tokens", "plain MiB", "trainer MiB", "ratio", "loss ±", "gradient ±"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    size = Size(vocabulary=args.vocabulary)
    name = f"{size.rows} rows of {size.length}, vocabulary {size.vocabulary:,}"
    ratio = compare(size, args, table, name)
    if not args.only_first:
        for rows in (4, 16):
            compare(replace(size, rows=rows), args, table, f"{rows} rows")
        for length in (128, 512):
            compare(replace(size, length=length), args, table, f"rows of {length}")
        for share in (4, 2):
            other = replace(size, vocabulary=size.vocabulary // share)
            compare(other, args, table, f"vocabulary {other.vocabulary:,}")
    console.print(table)
    return ratio


def show_cache(args: argparse.Namespace, console: Console) -> None:
    """Print the bytes of a token in the KV cache, measured and as 2 x layers x heads x width x bytes.

    Measured is how much larger the engine's buffers for two tokens are than those for one.
    """
    table = Table("type", "bytes of a token", "by formula", title="KV cache of the tiny decoder")
    for dtype in (torch.float32, torch.bfloat16):
        bundle = build_bundle(args.vocabulary)
        bundle.model.to(dtype).eval()
        config = bundle.model.config
        width = config.hidden_size // config.num_attention_heads
        expected = 2 * config.num_hidden_layers * config.num_key_value_heads * width
        engine = TransformersEngine(PolicyModule(bundle))
        measured = engine.session_bytes(2) - engine.session_bytes(1)
        table.add_row(str(dtype), f"{measured:,}", f"{expected * dtype.itemsize:,}")
    console.print(table)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--logits-mib", type=float, default=16.0, help="update.logits_mib")
    parser.add_argument("--tokens-per-microbatch", type=int, default=512)
    parser.add_argument("--only-first", action="store_true", help="the first size alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=120)
    ratio = compare_sizes(args, console)
    show_cache(args, console)
    verdict = "met" if ratio >= TARGET else "missed"
    console.print(
        f"first size: {ratio:.1f} times less memory, target {TARGET:.0f} times: {verdict}"
    )
    console.print(
        f"Peaks of torch's CPU allocator by torch's profiler, beyond the weights; float32, one thread, "
        f"update.logits_mib={args.logits_mib:g}, update.tokens_per_microbatch={args.tokens_per_microbatch}, "
        f"gradient checkpointing on; torch {torch.__version__}, {platform.machine()}. The ratio grows with the number "
        "of sampled tokens of a minibatch."
    )


if __name__ == "__main__":
    main()
