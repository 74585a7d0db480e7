"""The image encoder and the projector of a model: their modules, and whether these are trained."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn import Module, Parameter
    from transformers import PreTrainedModel

# projectors inside the encoder, as Qwen's models have them
_INNER_PROJECTOR = r"(?:.*\.)?\w*merger(?:_list)?(?:\..*)?"


@dataclass(frozen=True)
class VisionParts:
    """Regular expressions that fully match the names of modules and weights, None where the model has no such part.

    Attributes:
        encoder: Encoders of images, and of sounds.
        projector: What lies between an encoder and the decoder.
    """

    encoder: str | None = None
    projector: str | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> VisionParts:
        """Find the encoders by `get_encoder`; the projector is all that is neither theirs nor the decoder's."""
        candidates = [model.get_encoder(modality="image"), model.get_encoder(modality="audio")]
        # a model without one returns itself, or None
        missing = (model, model.base_model, None)
        encoders = [
            encoder for encoder in candidates if not any(encoder is none for none in missing)
        ]
        if not encoders:
            return cls()
        text = [model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()]
        within = "|".join(re.escape(name) for name in _names(model, encoders))
        parts = (*encoders, *(part for part in text if part is not None))
        outside = [re.escape(name) + r"(?:\..*)?" for name in _names_without(model, parts)]
        return cls(
            encoder=rf"(?:{within})(?:\.(?!{_INNER_PROJECTOR}$).*)?",
            projector="|".join([rf"(?:{within})\.{_INNER_PROJECTOR}", *outside]),
        )


def _names(model: Module, modules: list[Module]) -> list[str]:
    return [
        name for name, module in model.named_modules() if any(module is other for other in modules)
    ]


def _names_without(model: Module, parts: tuple[Module, ...]) -> list[str]:
    """Return the names of the outermost modules and of single weights that have no weight of these parts."""
    known = {id(weight) for part in parts for weight in part.parameters()}
    free = {
        name: weights
        for name, module in model.named_modules()
        if (weights := [id(weight) for weight in module.parameters()])
    } | {name: [id(weight)] for name, weight in model.named_parameters()}
    free = {name: weights for name, weights in free.items() if known.isdisjoint(weights)}
    return [name for name in free if name.rpartition(".")[0] not in free]


def weights_of(model: Module, pattern: str | None) -> list[Parameter]:
    """Return the weights whose names fully match a pattern of `VisionParts`."""
    if pattern is None:
        return []
    return [weight for name, weight in model.named_parameters() if re.fullmatch(pattern, name)]


def vision_weights(model: PreTrainedModel) -> list[Parameter]:
    """Return the weights of a model's encoders and projector, none of a text model."""
    parts = VisionParts.of(model)
    return [*weights_of(model, parts.encoder), *weights_of(model, parts.projector)]
