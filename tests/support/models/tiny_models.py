"""Sizes of models that are small enough for any test."""

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
VISION = {"width": 32, "heads": 2}
