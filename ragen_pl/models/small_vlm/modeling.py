"""The small vision-language model as a transformers model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    BaseModelOutputWithPooling,
    CausalLMOutputWithPast,
)

from ragen_pl.models.small_vlm.configuration import SmallVLMConfig
from ragen_pl.models.small_vlm.decoder import SmallDecoder


class SmallVLMPreTrainedModel(PreTrainedModel):
    """Settings of the base and the generating model."""

    config_class = SmallVLMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _no_split_modules = ["Qwen2DecoderLayer", "LastLayer"]  # noqa: RUF012 - transformers' own convention

    def _init_weights(self, module: nn.Module) -> None:
        """Draw the encoder's and the projector's weights by torch's defaults; the decoder draws its own.

        Also called for weights that a loaded folder lacks: no weight may stay undrawn.
        """
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()


class SmallVLMModel(SmallVLMPreTrainedModel):
    """Encoder, projector and decoder, without a head."""

    def __init__(self, config: SmallVLMConfig) -> None:
        # timm is slow to import
        from ragen_pl.models.small_vlm.vision import build_encoder

        super().__init__(config)
        hidden, width = config.text_config.hidden_size, config.vision["width"]
        self.vision = build_encoder(**config.vision)
        self.projector = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden)
        )
        self.language_model = SmallDecoder._from_config(config.text_config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the decoder's token embedding."""
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the decoder's token embedding."""
        self.language_model.set_input_embeddings(value)

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """Return the image encoder, or the model itself for other modalities."""
        return self.vision if modality == "image" else super().get_encoder(modality)

    def get_image_features(self, pixel_values: Tensor) -> BaseModelOutputWithPooling:
        """Return the features `[images, cells, hidden]` of images as `pooler_output`.

        Args:
            pixel_values: `[images, 3, height, width]` from 0 to 255, as uint8 or in a floating type.
        """
        encoded = self.vision(pixel_values)
        return BaseModelOutputWithPooling(
            last_hidden_state=encoded, pooler_output=self.projector(encoded)
        )

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        pixel_values: Tensor | None = None,
        use_cache: bool | None = None,
        mm_encoder_outputs: Mapping[str, Any] | None = None,
        first_read: int = 0,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return the decoder's states; features of images replace the image tokens.

        The images are `pixel_values`, or encoded ones: the `image` of `mm_encoder_outputs`, an output of
        `get_image_features`. The states are those of the positions from `first_read` on.
        """
        if inputs_embeds is None:
            if input_ids is None:
                raise ValueError("give input_ids or inputs_embeds")
            inputs_embeds = self.get_input_embeddings()(input_ids)
            if pixel_values is not None:
                mm_encoder_outputs = {"image": self.get_image_features(pixel_values)}
            if mm_encoder_outputs is not None:
                features = mm_encoder_outputs["image"].pooler_output
                inputs_embeds = self._with_features(input_ids, inputs_embeds, features)
        return self.language_model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            first_read=first_read,
            **kwargs,
        )

    def _with_features(self, input_ids: Tensor, embeds: Tensor, features: Tensor) -> Tensor:
        features = features.flatten(0, -2)
        slots = input_ids == self.config.image_token_id
        if int(slots.sum()) != len(features):
            raise ValueError(
                f"found {int(slots.sum())} image slots for {len(features)} image features"
            )
        return embeds.masked_scatter(slots.unsqueeze(-1), features.to(embeds.dtype))


class SmallVLMForConditionalGeneration(SmallVLMPreTrainedModel, GenerationMixin):
    """The model with its language head, tied to the token embedding."""

    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: SmallVLMConfig) -> None:
        super().__init__(config)
        text = config.text_config
        self.model = SmallVLMModel(config)
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the decoder's token embedding."""
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the decoder's token embedding."""
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.lm_head

    def get_image_features(self, pixel_values: Tensor) -> BaseModelOutputWithPooling:
        """Return the features `[images, cells, hidden]` of images as `pooler_output`."""
        return self.model.get_image_features(pixel_values)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits of the last `logits_to_keep` positions (0: all), and the loss if there are labels."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            pixel_values=pixel_values,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.text_config.vocab_size
            )
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values
        )


__all__ = ["SmallVLMForConditionalGeneration", "SmallVLMModel"]
