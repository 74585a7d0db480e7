"""ModelBundle: a model with its tokenizer and processor, and one interface to all model families.

Nothing outside this package branches on the model family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ragen_pl.models.distribution import log_distribution

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Properties of a model that its family's config may or may not name, with their defaults."""

    image_token_id: int | None = None
    """Id that stands for an image's features."""
    eos_token_ids: frozenset[int] = frozenset()
    """Ids that end a response, by the generation config."""
    logit_factor: float = 1.0
    """Factor of the logits: Granite divides them, Cohere multiplies them."""
    logit_bound: float | None = None
    """Bound of the logits, as in Gemma 2."""
    additive_masks: bool = False
    """Whether attention adds its mask to the scores instead of reading it as true and false."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelFacts:
        """Read the facts from a model's configs. This is the only place that probes them."""
        config, generation = model.config, model.generation_config
        text = config.get_text_config()
        eos = None if generation is None else generation.eos_token_id
        factor = getattr(text, "logit_scale", None) or 1.0
        divisor = getattr(text, "logits_scaling", None) or 1.0
        return cls(
            image_token_id=getattr(config, "image_token_id", None),
            eos_token_ids=frozenset(() if eos is None else [eos] if isinstance(eos, int) else eos),
            logit_factor=factor / divisor,
            logit_bound=getattr(text, "final_logit_softcapping", None),
            additive_masks=text._attn_implementation == "eager",
        )


@dataclass
class ModelBundle:
    """A policy's model, its tokenizer and, if it sees images, its processor."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    processor: ProcessorMixin | None = None
    _token_texts: dict[int, str] = field(default_factory=dict, repr=False)
    _image_tokens: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)
    # by number of patches
    _grids: dict[int, Tensor] = field(default_factory=dict, repr=False)
    _banned: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    @cached_property
    def facts(self) -> ModelFacts:
        """What the model's configs say; read on first use."""
        return ModelFacts.of(self.model)

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

    # ---- tokens

    @property
    def pad_token_id(self) -> int:
        """Id of padding."""
        pad = self.tokenizer.pad_token_id
        return int(pad if pad is not None else self.end_of_turn_id)

    @property
    def end_of_turn_id(self) -> int:
        """Id that ends a written response."""
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise ValueError(
                "the tokenizer has no eos_token; set it to the token that ends a response and save it"
            )
        return int(eos)

    @property
    def eos_token_ids(self) -> set[int]:
        """All ids that end a response."""
        return {self.end_of_turn_id, *self.facts.eos_token_ids}

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """Ids that are never sampled: control tokens that do not end a response, and ids without a token."""
        special = set(self.special_tokens) - self.eos_token_ids
        if self.image_token_id is not None:
            special.add(self.image_token_id)
        rows = self.model.get_output_embeddings().weight.shape[0]
        return tuple(sorted(special | set(range(len(self.tokenizer), rows))))

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

    def piece(self, token: int) -> str:
        """Return the text of one token."""
        if token not in self._token_texts:
            text = self.tokenizer.decode([token], skip_special_tokens=False)
            self._token_texts[token] = str(text)
        return self._token_texts[token]

    # ---- images

    @property
    def image_token_id(self) -> int | None:
        """Id that stands for an image's features, None for a text model."""
        return None if self.processor is None else self.facts.image_token_id

    def num_image_tokens(self, image: np.ndarray) -> int:
        """Return the number of tokens of an image `[height, width, 3]`."""
        assert self.processor is not None
        size = (image.shape[0], image.shape[1])
        if size not in self._image_tokens:
            count = self.processor._get_num_multimodal_tokens  # type: ignore[attr-defined]
            self._image_tokens[size] = int(count(image_sizes=[list(size)]).num_image_tokens[0])
        return self._image_tokens[size]

    def expand_image_slots(self, ids: np.ndarray, images: Sequence[np.ndarray]) -> np.ndarray:
        """Repeat each image token once for each feature of its image.

        Raises:
            ValueError: The number of image tokens is not the number of images.
        """
        image_token = self.image_token_id
        if image_token is None:
            if images:
                raise ValueError(
                    "the environment shows images and the model reads text only; choose a vision-language "
                    "model (model=small_vlm) or a text environment"
                )
            return ids
        counts = np.ones(len(ids), dtype=np.int64)
        places = np.flatnonzero(ids == image_token)
        if len(places) != len(images):
            raise ValueError(f"the prompt has {len(places)} image slots for {len(images)} images")
        counts[places] = [self.num_image_tokens(image) for image in images]
        return np.repeat(ids, counts)

    def pixel_values(self, images: Sequence[np.ndarray]) -> Tensor:
        """Return the model's input for images, `[images, …]`.

        Args:
            images: RGB images, each uint8 `[height, width, 3]`.

        Raises:
            ValueError: The images make grids of different sizes.
        """
        assert self.processor is not None
        processed = self.processor.image_processor(images=list(images), return_tensors="pt")
        values: Tensor = processed["pixel_values"]
        grids: Tensor | None = processed.get("image_grid_thw")
        if grids is None:
            return values
        # Qwen's processors join the patches of all images into one list
        if len(grids.unique(dim=0)) != 1:
            raise ValueError(f"found images of grids {grids.tolist()}, expected one size")
        values = values.view(len(images), -1, values.shape[-1])
        self._grids[values.shape[1]] = grids[0]
        return values

    def features(self, pixel_values: Tensor) -> Tensor:
        """Return features `[images, tokens, hidden]` of rows of `pixel_values`."""
        encode: Callable[..., Any] = self.model.get_image_features  # type: ignore[assignment]
        if pixel_values.ndim == 3:  # patches: `[images, patches, values]`
            grid = self._grids[pixel_values.shape[1]].to(pixel_values.device)
            grids = grid.expand(len(pixel_values), 3)
            output = encode(pixel_values.flatten(0, 1), image_grid_thw=grids)
        else:
            output = encode(pixel_values)
        # a tensor, or one for each image
        features = output.pooler_output
        return features if isinstance(features, Tensor) else torch.stack(list(features))

    # ---- the decoder

    def embed(self, ids: Tensor, features: Tensor | None = None) -> Tensor:
        """Return the decoder's input embeddings, `[…, time, hidden]`.

        Args:
            ids: int64 `[…, time]`.
            features: `[image tokens, hidden]`, in the order of the image tokens; None if the ids have none.
        """
        embeds: Tensor = self.model.get_input_embeddings()(ids)
        if features is None:
            return embeds
        slots = ids.eq(-1 if self.image_token_id is None else self.image_token_id).unsqueeze(-1)
        return embeds.masked_scatter(slots, features.to(embeds.dtype))

    @property
    def decoder(self) -> Callable[..., Any]:
        """The decoder without its head, from embeddings to `last_hidden_state`."""
        base: Callable[..., Any] = self.model.model
        return base

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return logits `[…, vocab]` of hidden states `[…, hidden]`, scaled and bounded as the model does."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        factor, bound = self.facts.logit_factor, self.facts.logit_bound
        if factor != 1.0:
            logits = logits * factor
        return logits if bound is None else bound * torch.tanh(logits / bound)

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
        weight = self.model.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        return int(weight.shape[1])

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
