"""ModelBundle: a model with its tokenizer and processor, and one interface to all model families.

Nothing outside this package branches on the model family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from ragen_pl.base.instances import instances
from ragen_pl.chat_formats.chat_template import ChatTemplate
from ragen_pl.chat_formats.template_source import template_source
from ragen_pl.models.distribution import log_distribution
from ragen_pl.models.facts import ModelFacts, backbone_of
from ragen_pl.models.images import ImageEncoder
from ragen_pl.models.logit_scale import LogitScale
from ragen_pl.models.norms import fuse_norms
from ragen_pl.models.processor_inputs import on_device, own_inputs, taken_by, text_inputs
from ragen_pl.models.vision_parts import vision_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin


@dataclass(slots=True)
class PositionCount:
    """Positions of passes over samples, padding included."""

    whole: int = 0
    """With nothing shared."""
    computed: int = 0
    """As they were computed; see `ragen_pl.models.prefix_tree`."""

    def take(self) -> dict[str, float]:
        """Return the counts by name and begin anew."""
        counts = {"positions": float(self.whole), "computed_positions": float(self.computed)}
        self.whole = self.computed = 0
        return counts


@dataclass
class ModelBundle:
    """A policy's model, its tokenizer and, if it sees images, its processor.

    Attributes:
        model: Model with its language-model head.
        tokenizer: Tokenizer.
        processor: Processor of a vision-language model; None for a text model.
        image_settings: Keyword arguments of the processor's calls, such as `{"crop_to_patches": False}`.
        source: Folder or hub name of the weights; None for a model that was built from its config.
        calls_tools: Whether responses may hold the control tokens with which the chat template writes tool calls.
        token_pass: Forward pass over new tokens of cached sequences, faster than the model's own, with the arguments of
            `ragen_pl.models.small_vlm.token_pass.last_states`; None for the model's own.
        shares_prefix: Whether passes over whole sequences compute once what several rows begin with; see
            `ragen_pl.models.prefix_tree`.
        packs_rows: Whether whole sequences are computed without padding where that is exact, see
            `ragen_pl.models.packed_rows`; None for a GPU in 16 bits only.
        keeps_rows_apart: Whether the model was seen to keep packed rows apart; None before the first use.
        keeps_parts_apart: Whether it was seen to keep the parts of a tree of rows apart; None before the first use.
        positions: Positions of its passes over samples.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    processor: ProcessorMixin | None = None
    image_settings: Mapping[str, Any] = field(default_factory=dict)
    source: str | None = None
    calls_tools: bool = False
    token_pass: Callable[..., Tensor] | None = None
    shares_prefix: bool = True
    packs_rows: bool | None = None
    keeps_rows_apart: bool | None = field(default=None, repr=False, compare=False)
    keeps_parts_apart: bool | None = field(default=None, repr=False, compare=False)
    positions: PositionCount = field(default_factory=PositionCount, repr=False, compare=False)
    _logit_scale: LogitScale = field(init=False, repr=False)
    _token_texts: dict[int, str] = field(default_factory=dict, repr=False)
    _banned: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)
    _templates: dict[str, ChatTemplate] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Measure the scale of the logits before the weights are sharded or left out, and fuse norms."""
        self._logit_scale = LogitScale.of(self.model, backbone_of(self.model))
        fuse_norms(self.model)

    @cached_property
    def facts(self) -> ModelFacts:
        """Facts of the model and its configs, read on first use."""
        return ModelFacts.of(self.model, logit_scale=self._logit_scale)

    def with_model(self, model: PreTrainedModel) -> ModelBundle:
        """Return a bundle of another model with the same tokenizer and processor.

        A frozen image encoder that both models have gives its features to both.
        """
        other = ModelBundle(
            model,
            self.tokenizer,
            self.processor,
            self.image_settings,
            self.source,
            self.calls_tools,
            self.token_pass,
            self.shares_prefix,
            self.packs_rows,
        )
        if self.images is not None and other.images is not None:
            other.images.share(self.images)
        return other

    def input_difference(self, other: ModelBundle) -> str | None:
        """Return why another model can't read this one's token ids and images, None if it can."""
        if other.tokenizer.get_vocab() != self.tokenizer.get_vocab():
            return "its tokenizer is another"
        return self.image_difference(other)

    def token_difference(self, tokenizer: PreTrainedTokenizerBase) -> str | None:
        """Return how a tokenizer reads one of this model's ids otherwise, None if it reads all of them alike.

        An id is read alike if its token and its text are the same. Ids without a token, by which a vocabulary is
        padded, and further ids of the other tokenizer do not count.
        """
        ids = list(self.token_ids)
        own, others = _tokens(self.tokenizer), _tokens(tokenizer)
        found = next((number for number in ids if own.get(number) != others.get(number)), None)
        if found is not None:
            other = repr(others[found]) if found in others else "no token"
            return f"its tokenizer is another: id {found} is {own[found]!r} to the policy, and {other} to it"
        one_each = [[number] for number in ids]
        texts = zip(
            ids,
            self.tokenizer.batch_decode(one_each),
            tokenizer.batch_decode(one_each),
            strict=True,
        )
        for number, text, other in texts:
            if text != other:
                return f"its tokenizer is another: id {number} is {text!r} to the policy, and {other!r} to it"
        return None

    def image_difference(self, other: ModelBundle) -> str | None:
        """Return why another model can't read this one's images, None if it can."""
        if other.image_token_id != self.image_token_id:
            return "its token of an image is another"
        if self.processor is None or other.processor is None:
            return None
        own, others = (
            processor.image_processor.to_dict() for processor in (self.processor, other.processor)
        )
        if own != others or other.image_settings != self.image_settings:
            return "it processes images in another way"
        return None

    @property
    def device(self) -> torch.device:
        """Device of the model's weights."""
        return next(self.model.parameters()).device

    @property
    def renderer(self) -> Any:
        """Object that renders chats: the processor if it has a template, else the tokenizer."""
        if self.processor is not None and self.processor.chat_template:
            return self.processor
        return self.tokenizer

    def chat_template(
        self,
        arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> ChatTemplate:
        """Return the chat template with these values of its own variables and these tools; see `ChatTemplate`."""
        key = repr((sorted((arguments or {}).items()), tools))
        if key not in self._templates:
            # programs may send other tools with each request
            if len(self._templates) > 100:
                self._templates.clear()
            counts = () if self.processor is None else (1, 2)
            self._templates[key] = ChatTemplate(
                self.renderer, self.tokenizer, dict(arguments or {}), counts, tools
            )
        return self._templates[key]

    # ---- tokens

    @property
    def pad_token_id(self) -> int:
        """Id of padding; where the tokenizer has none that the model reads, that of `end_of_turn_id`."""
        pad = self.tokenizer.pad_token_id
        return self.end_of_turn_id if pad is None or pad >= self.embedding_count else int(pad)

    @cached_property
    def end_of_turn_id(self) -> int:
        """Id that ends a written response.

        It is the first control token in the chat template's text after a response, or else the first id there of
        the generation config. The tokenizer's eos_token can be another one: Gemma's turns end with `<end_of_turn>`.

        Raises:
            ValueError: There is no such token, and the tokenizer has no eos_token.
        """
        eos = self.tokenizer.eos_token_id
        if template_source(self.renderer):
            close = self.tokenizer(self.chat_template().response_suffix, add_special_tokens=False)[
                "input_ids"
            ]
            control = {*self.special_tokens, eos}
            ends = [token for token in close if token in control]
            ends = ends or [token for token in close if token in self._generation_ends]
            if ends:
                return int(ends[0])
        if eos is None:
            raise ValueError(
                "the tokenizer has no eos_token; set it to the token that ends a response and save it"
            )
        return int(eos)

    @property
    def eos_token_ids(self) -> set[int]:
        """All ids that end a response."""
        eos = self.tokenizer.eos_token_id
        ids = {self.end_of_turn_id, *self._generation_ends}
        return ids if eos is None else {*ids, int(eos)}

    @property
    def _generation_ends(self) -> frozenset[int]:
        """Ids that end a response by the generation config, which may change after the bundle is made."""
        generation = self.model.generation_config
        eos = None if generation is None else generation.eos_token_id
        ends = [] if eos is None else eos if isinstance(eos, list) else [eos]
        if not all(isinstance(token, int) and token >= 0 for token in ends):
            raise ValueError(f"generation_config.json: eos_token_id={eos}: expected ids of tokens")
        return frozenset(ends)

    @property
    def end_texts(self) -> tuple[str, ...]:
        """Texts of `eos_token_ids`, without ids that have no token."""
        ends = self.eos_token_ids.intersection(self.token_ids)
        return tuple(str(self.tokenizer.decode([token])) for token in sorted(ends))

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """Ids that are never sampled: ids without a token, and control tokens that are no part of a response.

        Those that end a response are part of it, and those that the chat template writes before its words. All of them
        have a logit: a tokenizer may have tokens beyond the model's.
        """
        special = set(self.special_tokens) - self.eos_token_ids
        if template_source(self.renderer):
            inner = self.chat_template().inner | self._call_tokens
            special = {token for token in special if self.special_tokens[token] not in inner}
        if self.image_token_id is not None:
            special.add(self.image_token_id)
        logits = set(range(self.logit_count))
        return tuple(sorted(special & logits | logits.difference(self.token_ids)))

    def can_sample(self, ids: Tensor) -> Tensor:
        """Return which ids have a logit and are not banned, bool of the shape of `ids`."""
        return ~torch.isin(ids, self.banned(ids.device)) & (ids < self.logit_count)

    @property
    def logit_count(self) -> int:
        """Number of logits, which may exceed the number of tokens."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def embedding_count(self) -> int:
        """Number of ids that the model reads, which may differ from those of its logits and of its tokens."""
        return len(self._input_weight)

    @property
    def _input_weight(self) -> Tensor:
        weight = self.model.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """Ids that the tokenizer has a token for, in order. There may be gaps between them."""
        ids = self.tokenizer.get_vocab().values()
        return tuple(sorted({*ids, *self.tokenizer.added_tokens_decoder}))

    @property
    def _call_tokens(self) -> frozenset[str]:
        """Names of the control tokens that a response may hold in its tool calls."""
        if not self.calls_tools:
            return frozenset()
        # of models that call tools only
        from ragen_pl.chat_formats.tool_template import NoToolsError, ToolTemplate

        try:
            return ToolTemplate(self.chat_template(), self.end_texts).control_tokens
        except NoToolsError:
            # without tools a response is words
            return frozenset()

    def banned(self, device: torch.device) -> Tensor:
        """Return `banned_token_ids` as an int64 tensor."""
        if device not in self._banned:
            # autograd cannot save a tensor that is made in the engine's inference mode
            with torch.inference_mode(False):
                ids = torch.tensor(self.banned_token_ids, dtype=torch.int64, device=device)
            self._banned[device] = ids
        return self._banned[device]

    @property
    def special_tokens(self) -> dict[int, str]:
        """All control tokens by id, including those without a role of their own."""
        added = self.tokenizer.added_tokens_decoder
        unnamed = {number: str(token) for number, token in added.items() if token.special}
        named = zip(self.tokenizer.all_special_ids, self.tokenizer.all_special_tokens, strict=True)
        return unnamed | dict(named)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids as it continues another text.

        At the start of a text, tokenizers with a prefix space take a blank away.
        """
        anchor = self.end_of_turn_id
        text, before = (
            str(self.tokenizer.decode(tokens, skip_special_tokens=False))
            for tokens in ([anchor, *ids], [anchor])
        )
        return text.removeprefix(before)

    def piece(self, token: int) -> str:
        """Return the text of one token."""
        if token not in self._token_texts:
            self._token_texts[token] = self.decode([token])
        return self._token_texts[token]

    # ---- images

    @property
    def image_token_id(self) -> int | None:
        """Id that stands for an image's features, None for a text model."""
        return None if self.processor is None else self.facts.image_token_id

    @cached_property
    def images(self) -> ImageEncoder | None:
        """Encoder of images, None for a text model."""
        if self.processor is None:
            return None
        return ImageEncoder(self.model, self.processor, self.facts, self.image_settings)

    @property
    def trains_encoder(self) -> bool:
        """Whether weights of the image encoder or the projector are trained."""
        return any(weight.requires_grad for weight in vision_weights(self.model))

    def num_image_tokens(self, image: np.ndarray) -> int:
        """Return the number of image tokens of an image `[height, width, 3]`."""
        assert self.images is not None
        return self.images.num_tokens(image)

    def expand_image_slots(self, text: str, images: Sequence[np.ndarray]) -> str:
        """Replace the slot of each image in a rendered text by the processor's text for the image.

        Raises:
            ValueError: The number of slots is not the number of images, or the model reads text only.
        """
        if self.images is not None:
            return self.images.expand(text, images)
        if images:
            raise ValueError(
                "the environment shows images and the model reads text only; choose a vision-language "
                "model (model=small_vlm) or a text environment"
            )
        return text

    def own_inputs(self, ids: np.ndarray, images: Sequence[np.ndarray]) -> dict[str, Any]:
        """Return the inputs of the model's own forward for a conversation: all that its own processor gives for it.

        Args:
            ids: int64 `[time]`.
            images: Images of the conversation, each uint8 `[height, width, 3]`.
        """
        inputs = text_inputs(ids)
        if self.processor is not None:
            outputs = own_inputs(self.processor, ids, images, self.image_settings)
            inputs = taken_by(self.model.forward, outputs)
        return on_device(inputs, self.device)

    # ---- the decoder

    @property
    def backbone(self) -> Callable[..., Any]:
        """The model without its head, from ids and encoded images to `last_hidden_state`."""
        base: Callable[..., Any] = backbone_of(self.model)
        return base

    @cached_property
    def decoder(self) -> Module:
        """The decoder without the head."""
        decoder: Module = self.model.get_decoder()
        return decoder

    @cached_property
    def layers(self) -> tuple[Module, ...]:
        """The decoder's layers.

        Raises:
            ValueError: There are none that can be told from its other modules.
        """
        from transformers.modeling_layers import GradientCheckpointingLayer

        parts = list(self.decoder.modules())
        if layers := instances(parts, GradientCheckpointingLayer):
            return tuple(layers)
        # of old families, such as CTRL
        count = self.model.config.get_text_config().num_hidden_layers
        for part in instances(parts, ModuleList):
            if len(part) == count:
                return tuple(part)
        raise ValueError(
            f"model.build: the layers of {type(self.model).__name__} are not known; choose another model"
        )

    @property
    def checkpoints_layers(self) -> bool:
        """Whether activations of layers are computed again in the backward pass."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        kept = instances(self.layers, GradientCheckpointingLayer)
        return any(layer.gradient_checkpointing for layer in kept)

    @property
    def first_layer(self) -> Module:
        """The decoder's first layer, which the input embeddings enter."""
        return self.layers[0]

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return logits `[…, vocab]` of hidden states `[…, hidden]`, scaled and bounded as the model does."""
        return self.facts.logit_scale(self.model.get_output_embeddings()(hidden))

    def log_probs(self, hidden: Tensor, *, temperature: Tensor | float = 1.0) -> Tensor:
        """Return float32 log-probabilities `[…, vocab]` of the distribution that tokens are sampled from.

        Args:
            hidden: Hidden states, `[…, hidden]`.
            temperature: Sampling temperature; a tensor broadcasts against `[…, vocab]`.
        """
        return log_distribution(
            self.lm_head(hidden), temperature=temperature, banned=self.banned(hidden.device)
        )

    @property
    def hidden_size(self) -> int:
        """Width of the decoder's hidden states."""
        return self._input_weight.shape[1]

    def checkpoint_layers(self) -> None:
        """Compute the activations of each layer again in the backward pass, in train mode, instead of keeping them.

        Raises:
            ValueError: The model's layers cannot be run again.
        """
        if not self.model.supports_gradient_checkpointing:
            raise ValueError(
                f"update.gradient_checkpointing=true: {type(self.model).__name__} does not support it; set "
                "false, and a smaller update.tokens_per_microbatch"
            )
        # reentrant checkpoints would leave out weights under frozen embeddings, and break DDP
        if hasattr(self.model, "activation_checkpointing_enable"):
            self.model.activation_checkpointing_enable({"use_reentrant": False})
        else:  # its name before transformers 5.23
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def save(self, folder: str | Path) -> None:
        """Write model, tokenizer and processor as a Hugging Face folder."""
        self.model.save_pretrained(folder)
        (self.processor or self.tokenizer).save_pretrained(folder)

    def parameter_count(self) -> int:
        """Return the number of parameters; shared ones count once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def to(self, device: torch.device) -> ModelBundle:
        """Move the model and return the bundle."""
        torch.nn.Module.to(self.model, device)
        return self


def _tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return a tokenizer's tokens by id."""
    added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    return {number: token for token, number in tokenizer.get_vocab().items()} | added
