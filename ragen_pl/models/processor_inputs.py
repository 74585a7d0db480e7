"""Inputs of a conversation as the family's own processor gives them, all of them, for any token ids.

A processor reads text. Sampled ids would not come back from their text, and what a processor derives from ids, such as
types of tokens (Gemma 3, ERNIE-4.5-VL) or of experts, would belong to other ids. So it is called with a tokenizer that
returns the given ids.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase, ProcessorMixin

    from ragen_pl.models.facts import ModelFacts

# of arrays; processors would take an image of height 3 for one whose channels come first
_LAYOUT = {"input_data_format": "channels_last"}
_TYPES = "mm_token_type_ids"
EXAMPLE = np.zeros((64, 64, 3), dtype=np.uint8)
"""An image."""


class _GivenIds:
    """A tokenizer that reads every text as the same ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> None:
        self._tokenizer, self._ids = tokenizer, ids.tolist()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(
        self, text: Any = None, *_: Any, return_tensors: str | None = None, **__: Any
    ) -> BatchEncoding:
        from transformers import BatchEncoding

        ids = self._ids
        data = {"input_ids": [ids], "attention_mask": [[1] * len(ids)]}
        # the text is that of the images, of which some ask for the number of tokens (Idefics 3)
        places = self._tokenizer(text, add_special_tokens=False).encodings
        return BatchEncoding(data, encoding=places, tensor_type=return_tensors)


def processed(processor: ProcessorMixin, **inputs: Any) -> Any:
    """Return a processor's outputs, without its advice to its own authors."""
    call: Any = processor
    layout = _LAYOUT if "images" in inputs else {}
    with warnings.catch_warnings():
        # ERNIE-4.5-VL's makes arrays of tensors
        warnings.simplefilter("ignore", DeprecationWarning)
        return call(**inputs, **layout)


def own_inputs(
    processor: ProcessorMixin,
    ids: np.ndarray,
    images: Sequence[np.ndarray],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Return every output of a processor for a conversation, the ids and their attention mask among them.

    Args:
        processor: Processor of the model.
        ids: int64 `[time]`, with the image tokens of all images.
        images: Images of the conversation, each uint8 `[height, width, 3]`.
        settings: Keyword arguments of the processor's calls.
    """
    reader: Any = copy.copy(processor)
    reader.tokenizer = _GivenIds(processor.tokenizer, ids)
    text = [processor.image_token * len(images)]  # type: ignore[attr-defined]
    shown = {"images": [list(images)]} if images else {}
    # the types that the model expects, which some processors give only if asked to (Cosmos 3 Edge)
    asked = {f"return_{name}": True for name in processor.model_input_names if name == _TYPES}
    return dict(processed(reader, text=text, return_tensors="pt", **asked, **shown, **settings))


def slot_texts(
    processor: ProcessorMixin,
    slot: str,
    images: Sequence[np.ndarray],
    settings: Mapping[str, Any],
    *,
    family: str,
) -> list[str]:
    """Return the text that a processor writes in place of the slot of each image of a prompt.

    Args:
        processor: Processor of the model.
        slot: Text that stands for an image.
        images: Images of the prompt, each uint8 `[height, width, 3]`.
        settings: Keyword arguments of the processor's calls.
        family: Name of the family, for the error.

    Raises:
        ValueError: The processor does not tell the texts of images.
    """
    try:
        outputs = processed(
            processor,
            images=[list(images)],
            text=[slot * len(images)],
            return_text_replacement_offsets=True,
            # the sizes of tiles are read as tensors (Ovis2)
            return_tensors="pt",
            **settings,
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if any(image.shape != EXAMPLE.shape for image in images):
            # a ValueError if it is not for the sizes
            slot_texts(processor, slot, [EXAMPLE] * len(images), settings, family=family)
            sizes = ", ".join(
                sorted({f"{height} x {width}" for height, width, _ in map(np.shape, images)})
            )
            raise ValueError(
                f"{family} does not take images of {sizes} pixels ({' '.join(str(error).split()):.300})"
            ) from error
        raise ValueError(
            f"model.build: the processor of {family} does not read arrays of images in a list for each text, as others "
            "do; choose another model"
        ) from error
    if "text_replacement_offsets" not in outputs:
        raise ValueError(
            f"model.build: the processor of {family} does not give the text of each image, so turns can't be told "
            "apart; choose another model"
        )
    (places,) = outputs["text_replacement_offsets"]
    return [place["replacement"] for place in places]


def text_inputs(ids: np.ndarray) -> dict[str, Any]:
    """Return the inputs of a text model for a conversation's ids, int64 `[time]`."""
    tokens = torch.from_numpy(ids)[None]
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def on_device(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return inputs with their tensors on a device."""
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }


def taken_by(forward: Callable[..., Any], outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a processor's outputs that a forward takes."""
    arguments = inspect.signature(forward).parameters
    takes_all = any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values())
    return {name: value for name, value in outputs.items() if takes_all or name in arguments}


@dataclass(frozen=True, slots=True)
class TokenTypes:
    """Types of tokens that a model's forward takes, such as of the tokens of an image.

    Attributes:
        tables: int64 `[vocabulary]` by argument.
        beyond: Arguments that say something of other tokens than the image token, such as of those around an image,
            which ERNIE-4.5-VL computes by other experts.
    """

    tables: Mapping[str, Tensor] = field(default_factory=dict)
    beyond: frozenset[str] = frozenset()

    def __call__(self, ids: Tensor, *, shown: bool) -> dict[str, Tensor]:
        """Return the types of tokens by argument, each int64 `[rows, time]`.

        Args:
            ids: int64 `[rows, time]`.
            shown: Whether image tokens are among them.
        """
        return {
            name: table.to(ids.device)[ids]
            for name, table in self.tables.items()
            if shown or name in self.beyond
        }

    def to(self, device: torch.device) -> TokenTypes:
        """Return the types on a device."""
        return replace(self, tables={name: table.to(device) for name, table in self.tables.items()})

    @classmethod
    def of(
        cls,
        processor: ProcessorMixin,
        slot: str,
        settings: Mapping[str, Any],
        *,
        facts: ModelFacts,
        vocabulary: int,
    ) -> TokenTypes:
        """Read the types from what a processor says of a prompt of all tokens of the vocabulary.

        Args:
            processor: Processor of the model.
            slot: What the processor writes for `EXAMPLE` with the settings.
            settings: Keyword arguments of the processor's calls.
            facts: Facts of the model.
            vocabulary: Number of ids.
        """
        if not facts.type_arguments:
            return cls()
        tokenizer: Any = processor.tokenizer
        slot_ids = tokenizer(slot, add_special_tokens=False)["input_ids"]
        every = processor.image_token_ids + processor.video_token_ids + processor.audio_token_ids
        media = [token for token in every if token is not None]
        ids = np.concatenate([slot_ids, np.setdiff1d(np.arange(vocabulary), media)])
        outputs = own_inputs(processor, ids, [EXAMPLE], settings)
        tables = {
            name: torch.zeros(vocabulary, dtype=torch.int64).index_put(
                (torch.from_numpy(ids),), outputs[name][0].long()
            )
            for name in facts.type_arguments & outputs.keys()
        }
        others = (
            name
            for name, table in tables.items()
            if table.nonzero().flatten().tolist() != [facts.image_token_id]
        )
        return cls(tables, frozenset(others))
