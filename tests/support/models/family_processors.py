"""Processors of images for the tiny models of families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    Gemma3ImageProcessor,
    Gemma3Processor,
    Gemma4AudioFeatureExtractor,
    Gemma4ImageProcessor,
    Gemma4Processor,
    Gemma4VideoProcessor,
    GotOcr2ImageProcessor,
    InternVLProcessor,
    Lfm2VlImageProcessor,
    Lfm2VlProcessor,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2VLImageProcessor,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)


def qwen_processor(
    kind: Any, video: Any, **sizes: Any
) -> Callable[[PreTrainedTokenizerFast], ProcessorMixin]:
    def build(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
        processor: ProcessorMixin = kind(
            Qwen2VLImageProcessor(size={"shortest_edge": 28 * 28, "longest_edge": 84 * 84}, **sizes), tokenizer,
            video_processor=video(), chat_template=tokenizer.chat_template,
        )  # fmt: skip
        return processor

    return build


def gemma3_processor(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    images = Gemma3ImageProcessor(size={"height": 32, "width": 32})
    return Gemma3Processor(
        images, tokenizer, chat_template=tokenizer.chat_template, image_seq_length=4
    )


def gemma4_processor(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    # 70 is the smallest number of tokens an image may have
    images = Gemma4ImageProcessor(patch_size=4, max_soft_tokens=70)
    return Gemma4Processor(
        Gemma4AudioFeatureExtractor(), images, tokenizer, Gemma4VideoProcessor(), image_seq_length=70,
        chat_template=tokenizer.chat_template,
    )  # fmt: skip


def smolvlm_processor(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    images = SmolVLMImageProcessor(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, do_image_splitting=True
    )
    return SmolVLMProcessor(
        images, tokenizer, video_processor=SmolVLMVideoProcessor(), image_seq_len=4,
        chat_template=tokenizer.chat_template,
    )  # fmt: skip


def llava_next_processor(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    images = LlavaNextImageProcessor(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}, image_grid_pinpoints=[[16, 32], [32, 16]]
    )  # fmt: skip
    return LlavaNextProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )  # fmt: skip


def llava_onevision_processor(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    images = LlavaOnevisionImageProcessor(
        size={"height": 16, "width": 16}, image_grid_pinpoints=[[16, 32], [32, 16]]
    )
    return LlavaOnevisionProcessor(
        images, tokenizer, LlavaOnevisionVideoProcessor(), num_image_tokens=4, vision_feature_select_strategy="full",
        chat_template=tokenizer.chat_template,
    )  # fmt: skip


def internvl_processor(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    images = GotOcr2ImageProcessor(size={"height": 32, "width": 32})
    return InternVLProcessor(
        images, tokenizer, video_processor=_internvl_video(), image_seq_length=4, chat_template=tokenizer.chat_template
    )  # fmt: skip


def _internvl_video() -> Any:
    from transformers import InternVLVideoProcessor

    return InternVLVideoProcessor()


def lfm2_vl_processor(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    images = Lfm2VlImageProcessor(
        tile_size=32, encoder_patch_size=8, downsample_factor=2, min_image_tokens=4, max_image_tokens=16,
        max_num_patches=64, max_tiles=4, use_thumbnail=False,
    )  # fmt: skip
    return Lfm2VlProcessor(images, tokenizer, chat_template=tokenizer.chat_template)
