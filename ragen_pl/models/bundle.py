"""ModelBundle: a model with its tokenizer and processor, and what the rest of the project asks of them.

Nothing outside this package knows which model it has.
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

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin


@dataclass
class ModelBundle:
    """A policy's model, tokenizer and, where it sees images, processor."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    processor: ProcessorMixin | None = None
    _pieces: dict[int, str] = field(default_factory=dict, repr=False)
    _image_tokens: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)
    _grids: dict[int, Tensor] = field(default_factory=dict, repr=False)  # by number of patches

    @property
    def renderer(self) -> Any:
        """What renders chats: the processor where it has a template, else the tokenizer."""
        if self.processor is not None and getattr(self.processor, "chat_template", None):
            return self.processor
        return self.tokenizer

    # ---- tokens

    @property
    def pad_token_id(self) -> int:
        """The id that fills rows up."""
        pad = self.tokenizer.pad_token_id
        return int(pad if pad is not None else self.end_of_turn_id)

    @property
    def end_of_turn_id(self) -> int:
        """The id that ends a written response."""
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise ValueError(
                "the tokenizer has no eos_token; set it to the token that ends a response and save it"
            )
        return int(eos)

    @property
    def eos_token_ids(self) -> set[int]:
        """All ids that end a response."""
        config = getattr(self.model, "generation_config", None)
        eos = getattr(config, "eos_token_id", None)
        known = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        return {self.end_of_turn_id, *known}

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """Ids that must never be sampled: control tokens but for those that end a response, and ids without a token."""
        special = set(self.special_tokens) - self.eos_token_ids
        if self.image_token_id is not None:
            special.add(self.image_token_id)
        rows = self.model.get_output_embeddings().weight.shape[0]
        return tuple(sorted(special | set(range(len(self.tokenizer), rows))))

    @property
    def special_tokens(self) -> dict[int, str]:
        """All control tokens, those without a role of their own included, by id."""
        added = self.tokenizer.added_tokens_decoder
        unnamed = {number: str(token) for number, token in added.items() if token.special}
        named = zip(self.tokenizer.all_special_ids, self.tokenizer.all_special_tokens, strict=True)
        return unnamed | dict(named)

    def piece(self, token: int) -> str:
        """Return the text of one token."""
        if token not in self._pieces:
            self._pieces[token] = str(self.tokenizer.decode([token], skip_special_tokens=False))
        return self._pieces[token]

    # ---- images

    @property
    def image_token_id(self) -> int | None:
        """The id that stands for an image's features, None for a text model."""
        if self.processor is None:
            return None
        found = getattr(self.model.config, "image_token_id", None)
        return None if found is None else int(found)

    def num_image_tokens(self, image: np.ndarray) -> int:
        """Return how many tokens an image `[height, width, 3]` takes."""
        assert self.processor is not None
        size = (image.shape[0], image.shape[1])
        if size not in self._image_tokens:
            count = self.processor._get_num_multimodal_tokens  # type: ignore[attr-defined]
            self._image_tokens[size] = int(count(image_sizes=[list(size)]).num_image_tokens[0])
        return self._image_tokens[size]

    def expand_image_slots(self, ids: np.ndarray, images: Sequence[np.ndarray]) -> np.ndarray:
        """Repeat each image id as often as its image has features.

        Raises:
            ValueError: the ids have another number of image slots than there are images.
        """
        slot = self.image_token_id
        if slot is None:
            if images:
                raise ValueError(
                    "the environment shows images and the model reads text only; choose a vision-language "
                    "model (model=small_vlm) or a text environment"
                )
            return ids
        counts = np.ones(len(ids), dtype=np.int64)
        places = np.flatnonzero(ids == slot)
        if len(places) != len(images):
            raise ValueError(f"the prompt has {len(places)} image slots for {len(images)} images")
        counts[places] = [self.num_image_tokens(image) for image in images]
        return np.repeat(ids, counts)

    def pixel_values(self, images: Sequence[np.ndarray]) -> Tensor:
        """Return images, each uint8 `[height, width, 3]`, as the model takes them, `[images, …]`.

        Raises:
            ValueError: the images make grids of different sizes.
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
        """Return features `[images, tokens, hidden]` of what `pixel_values` returned, or of some of its rows."""
        encode: Callable[..., Any] = self.model.get_image_features  # type: ignore[assignment]
        if pixel_values.ndim == 3:  # patches: `[images, patches, values]`
            grid = self._grids[pixel_values.shape[1]].to(pixel_values.device)
            grids = grid.expand(len(pixel_values), 3)
            found = encode(pixel_values.flatten(0, 1), image_grid_thw=grids)
        else:
            found = encode(pixel_values)
        # transformers' own models wrap their features in an output, as a tensor or one a image
        features = getattr(found, "pooler_output", found)
        return features if isinstance(features, Tensor) else torch.stack(list(features))

    # ---- the decoder

    def embed(self, ids: Tensor, features: Tensor | None = None) -> Tensor:
        """Return the decoder's inputs `[…, time, hidden]`: words' embeddings, and features in the image slots.

        Args:
            ids: int64 `[…, time]`.
            features: `[slots, hidden]`, in the slots' order; None where the ids have none.
        """
        embeds: Tensor = self.model.get_input_embeddings()(ids)
        if features is None:
            return embeds
        slots = ids.eq(-1 if self.image_token_id is None else self.image_token_id).unsqueeze(-1)
        return embeds.masked_scatter(slots, features.to(embeds.dtype))

    @property
    def decoder(self) -> Callable[..., Any]:
        """The decoder without its head: embeddings in, `last_hidden_state` out."""
        base: Callable[..., Any] = self.model.model
        return base

    @cached_property
    def adds_masks(self) -> bool:
        """Whether the decoder's attention adds its mask to the scores, rather than reading it as true and false."""
        config = self.model.config.get_text_config()
        return str(getattr(config, "_attn_implementation", "sdpa")) == "eager"

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return logits `[…, vocab]` of hidden states `[…, hidden]`, scaled as the model itself does.

        Granite divides them, Cohere multiplies them, Gemma 2 bounds them.
        """
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        factor, bound = self._logit_scale
        if factor != 1.0:
            logits = logits * factor
        return logits if bound is None else bound * torch.tanh(logits / bound)

    @cached_property
    def _logit_scale(self) -> tuple[float, float | None]:
        config = self.model.config.get_text_config()
        divisor = getattr(config, "logits_scaling", None) or 1.0
        factor = getattr(config, "logit_scale", None) or 1.0
        return factor / divisor, getattr(config, "final_logit_softcapping", None)

    @property
    def hidden_size(self) -> int:
        """Width of the decoder's states."""
        weight = self.model.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        return int(weight.shape[1])

    def save(self, folder: str | Path) -> None:
        """Write model, tokenizer and processor as a Hugging Face folder."""
        self.model.save_pretrained(folder)
        (self.processor or self.tokenizer).save_pretrained(folder)

    def parameter_count(self) -> int:
        """Return the number of parameters, shared ones counted once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def to(self, device: torch.device) -> ModelBundle:
        """Move the model and return the bundle."""
        torch.nn.Module.to(self.model, device)
        return self
