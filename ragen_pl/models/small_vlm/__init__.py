"""The small vision-language model: a timm vision encoder, a projector, a transformers decoder.

Importing this package registers it with transformers' Auto classes, for `from_pretrained`.
"""

from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageTextToText,
    AutoProcessor,
)

from ragen_pl.models.small_vlm.configuration import SmallVLMConfig
from ragen_pl.models.small_vlm.modeling import SmallVLMForConditionalGeneration, SmallVLMModel
from ragen_pl.models.small_vlm.processing import SmallVLMImageProcessor, SmallVLMProcessor

AutoConfig.register(SmallVLMConfig.model_type, SmallVLMConfig, exist_ok=True)
AutoModel.register(SmallVLMConfig, SmallVLMModel, exist_ok=True)
AutoModelForImageTextToText.register(
    SmallVLMConfig, SmallVLMForConditionalGeneration, exist_ok=True
)
AutoProcessor.register(SmallVLMConfig, SmallVLMProcessor, exist_ok=True)
AutoImageProcessor.register(
    SmallVLMConfig,
    image_processor_classes=dict.fromkeys(("pil", "torchvision"), SmallVLMImageProcessor),
    exist_ok=True,
)

__all__ = [
    "SmallVLMConfig",
    "SmallVLMForConditionalGeneration",
    "SmallVLMImageProcessor",
    "SmallVLMModel",
    "SmallVLMProcessor",
]
