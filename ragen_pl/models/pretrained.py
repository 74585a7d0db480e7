"""Read the parts of a pretrained model from its folder or from the hub, and adapt them; errors name the setting."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ragen_pl.base.foreign_files import model_folder_problem
from ragen_pl.base.seeding import weights_seeded
from ragen_pl.models.adapters import choose_trained_weights
from ragen_pl.models.attention import pack_images
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.dropout import switch_dropout_off, switch_modules_off
from ragen_pl.models.positions import check_length, fix_rotary_scaling
from ragen_pl.models.settings import Attention

if TYPE_CHECKING:
    from transformers import (
        BaseImageProcessor,
        PretrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        ProcessorMixin,
    )

log = logging.getLogger(__name__)
# tensors that a message names, and its remedy
_NAMED = 3
_WHOLE = "give the whole folder that save_pretrained wrote, with its own config.json"
# messages of transformers in whose place are others of this module; a report of conversions is kept
_REPORT, _CONVERSION, _FLASH = "LOAD REPORT", "CONVERSION", "attempting to use Flash Attention"


def read_config(path: str, where: Mapping[str, Any]) -> PretrainedConfig:
    """Read a model's config.

    Args:
        path: Folder or name of the model.
        where: Where it is looked for, and whether Python files there may be run.

    Raises:
        FileNotFoundError: There is none, or a file of its folder is damaged or leads out of it.
        ValueError: transformers does not know the model.
    """
    from transformers import AutoConfig

    if Path(path).is_dir() and (problem := model_folder_problem(Path(path))) is not None:
        raise _no_model(path, problem)
    # registers the small model with the Auto classes
    import_module("ragen_pl.models.small_vlm")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path, **where)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"model.build.path={path}: transformers has no such model, and its folder brings Python files of its "
                "own; read them, then run them by model.build.trust_remote_code=true, or choose another model"
            ) from error
        raise _no_model(path, str(error).splitlines()[0]) from error
    return config


def _size_problem(config: PretrainedConfig, folder: Path) -> str | None:
    """Return in a clause a size of the decoder that is more than a folder's weights can hold; None without any.

    It is found before memory is taken for it: transformers makes weights that are missing.
    """
    files = [file for name in ("*.safetensors", "*.bin") for file in folder.glob(name)]
    sizes = config.get_text_config().to_dict()
    width = sizes.get("hidden_size")
    if not files or not isinstance(width, int):
        return None
    held = sum(file.stat().st_size for file in files)
    for name, power in (("vocab_size", 1), ("num_hidden_layers", 2)):
        count = sizes.get(name)
        # a value has four bits at least
        if isinstance(count, int) and count * width**power > 2 * held:
            return (
                f"config.json says {name}={count} and hidden_size={width}, and the files of its weights have {held} "
                "bytes"
            )
    return None


def _no_model(path: str, cause: str) -> FileNotFoundError:
    return FileNotFoundError(
        f"model.build.path={path}: no model can be read there ({cause}); give a folder written by save_pretrained, "
        "or a model's name where the hub can be reached"
    )


def sees_images(config: PretrainedConfig) -> bool:
    """Return whether transformers has a model with images for a config.

    A config without parts is that of a text model, of whichever Auto class (Mistral 4).
    """
    from transformers import AutoModelForImageTextToText

    return model_class(config) is AutoModelForImageTextToText and bool(config.sub_configs)


def model_class(config: PretrainedConfig) -> Any:
    """Return the Auto class of a config's models."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    known = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if known else AutoModelForCausalLM


def read_model(
    config: PretrainedConfig,
    path: str,
    attention: Attention | dict[str, Attention],
    settings: Mapping[str, Any],
) -> PreTrainedModel:
    """Load a model with its weights.

    Args:
        config: Its config.
        path: Folder or name of the model.
        attention: Attention of transformers, or that of each part.
        settings: Other arguments of `from_pretrained`.

    Raises:
        FileNotFoundError: Its files have too few bytes for what the config describes.
        ValueError: Weights are missing (`check_loaded`), or transformers can't run the model with this attention, or on
            this machine.
    """
    if (problem := _size_problem(config, Path(path))) is not None:
        raise _no_model(path, problem)
    try:
        with without_reports():
            model: PreTrainedModel
            model, loaded = model_class(config).from_pretrained(
                path,
                config=config,
                attn_implementation=attention,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **settings,
            )
    except ImportError as error:
        if "flash" not in str(attention):
            raise
        raise ValueError(
            f"model.build.attn_implementation={attention}: {str(error).splitlines()[0]}; set sdpa"
        ) from error
    except ValueError as error:
        if "does not support" not in str(error):
            raise
        # transformers' own advice names other keys
        raise ValueError(
            f"model.build.attn_implementation={attention}: transformers has no such attention for this family "
            f"({config.model_type}); set model.build.attn_implementation=eager"
        ) from error
    check_loaded(loaded, place=f"model.build.path={path}")
    return model


def check_loaded(loaded: Mapping[str, Any], *, place: str, remedy: str = _WHOLE) -> None:
    """Check that a model has got all of its weights from its files, in their shapes.

    transformers draws those that are missing, or of other shapes. A weight that is tied to another one and a buffer
    that the class computes are not missing. Further tensors in the files, such as those of a head that the class does
    not have, are left out with a line.

    Args:
        loaded: What `from_pretrained` says with `output_loading_info=True`.
        place: What was loaded, for messages.
        remedy: What to do about it, for messages.

    Raises:
        ValueError: Some are missing or have other shapes; it names the first ones.
    """
    if other := sorted(loaded["mismatched_keys"]):
        name, in_file, expected = other[0]
        more = f", and {len(other) - 1} more are of other shapes" if other[1:] else ""
        raise ValueError(
            f"{place}: its files hold {name} of shape {list(in_file)}, where the model has {list(expected)}{more}; "
            f"{remedy}"
        )
    if missing := loaded["missing_keys"]:
        raise ValueError(f"{place}: its files lack {_counted(missing)} of the model; {remedy}")
    if unused := loaded["unexpected_keys"]:
        log.warning(f"{place}: its files have {_counted(unused)} that the model does not use")


def _counted(names: Collection[str]) -> str:
    first = ", ".join(sorted(names)[:_NAMED])
    kind = "tensor" if len(names) == 1 else "tensors"
    return f"{len(names)} {kind} ({first}{', …' if len(names) > _NAMED else ''})"


@contextmanager
def without_reports() -> Iterator[None]:
    """Leave out messages of transformers: reports of what `check_loaded` says, and advice for flash attention.

    The advice is to load the model on the GPU and in 16 bits. The Trainer moves it, and may use autocast.
    """

    def is_other(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return _FLASH not in text and (_REPORT not in text or _CONVERSION in text)

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def load_tokenizer(path: str, **where: Any) -> PreTrainedTokenizerBase:
    """Load a tokenizer as its file describes it, even where transformers would replace it by a known model's own.

    Args:
        path: Folder or name of the model.
        where: Where it is looked for, such as `local_files_only` and `revision`, and `trust_remote_code`.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    # otherwise transformers asks whether Python files may be run
    where = {"trust_remote_code": False, **where}
    declared = get_tokenizer_config(path, **where).get("tokenizer_class")
    plain = declared in ("TokenizersBackend", "PreTrainedTokenizerFast")
    kind = PreTrainedTokenizerFast if plain else AutoTokenizer
    tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(path, **where)
    return tokenizer


def check_image_settings(processor: ProcessorMixin, settings: Mapping[str, Any]) -> None:
    """Check the names of settings that a processor would ignore.

    Raises:
        ValueError: The image processor has no such setting.
    """
    known = set(processor.image_processor.valid_kwargs.__annotations__)
    if unknown := sorted(set(settings) - known):
        raise ValueError(
            f"model.build.image_processor.{unknown[0]}: the model's image processor has no such setting; known: "
            + ", ".join(sorted(known))
        )


def present_image_settings(
    image_processor: BaseImageProcessor, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return settings of an image processor with its range of pixels as a `size`.

    Qwen's models and their relatives call the ends of the range `shortest_edge` and `longest_edge`. In transformers
    `min_pixels` and `max_pixels` are deprecated.

    Args:
        image_processor: The processor; an end that is not given is its own.
        settings: Keyword arguments of its calls.
    """
    ends = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
    present = {name: value for name, value in settings.items() if name not in ends}
    own = image_processor.to_dict().get("size") or {}
    if len(present) == len(settings) or not own.keys() >= {*ends.values()}:
        return dict(settings)
    given = {ends[name]: settings[name] for name in ends if settings.get(name) is not None}
    return present | {"size": {**own, **(settings.get("size") or {}), **given}}


def adapt_config(config: PretrainedConfig, *, max_tokens: int | None) -> list[str]:
    """Adapt a config to RL, and return a line on each change."""
    scaled = fix_rotary_scaling(config, max_tokens=max_tokens)
    return [*([] if scaled is None else [scaled]), *_switched_off(switch_dropout_off(config))]


def adapt_model(model: PreTrainedModel, *, max_tokens: int | None) -> list[str]:
    """Adapt a model to RL, and return a line on each change.

    Raises:
        ValueError: It has too few positions.
    """
    long = check_length(model, max_tokens=max_tokens)
    return [*([] if long is None else [long]), *_switched_off(switch_modules_off(model))]


def _switched_off(values: Mapping[str, float]) -> list[str]:
    if not values:
        return []
    named = ", ".join(f"{name}={value:g}" for name, value in values.items())
    return [f"dropout and noise are off, as in rollouts: 0 instead of {named}"]


def check_family(bundle: ModelBundle, *, shows_images: bool) -> None:
    """Check that conversations of several turns can be computed with a family's attention and images.

    Raises:
        ValueError: They can't.
    """
    facts = bundle.facts
    # a ValueError where they are not known
    _ = bundle.layers
    if bundle.model.config.is_encoder_decoder:
        raise ValueError(
            f"model.build.path={bundle.source}: in {facts.family} an encoder reads the prompt, and every turn would be "
            "a prompt of its own; choose another family"
        )
    if not facts.takes_cache:
        raise ValueError(
            f"model.build.path={bundle.source}: transformers' {facts.family} takes no keys, values or states of "
            "earlier turns; choose another family"
        )
    if not facts.takes_positions and not facts.keeps_states:
        raise ValueError(
            f"model.build.path={bundle.source}: transformers' {facts.family} takes no positions, so those of a short "
            "conversation would count the padding beside a long one; choose another family"
        )
    if by_call := facts.layers_by_call:
        raise ValueError(
            f"model.build.path={bundle.source}: in {facts.family} layers ({', '.join(sorted(by_call))}) read a prompt "
            "otherwise than a response, so log-probs of a token depend on what was sampled; choose another family"
        )
    if facts.attends_both_ways:
        raise ValueError(
            f"model.build.path={bundle.source}: in {facts.family} the tokens of a prompt, or of its images and what "
            "precedes them, attend to each other both ways, so a next turn would change the ones before; choose "
            "another family"
        )
    if facts.bidirectional_layers and not facts.masks_by_function:
        raise ValueError(
            f"model.build.attn_implementation: in {type(bundle.model).__name__} the tokens of an image attend to each "
            "other, which flash attention can't do; set sdpa, or {text_config: sdpa, vision_config: flash_attention_2}"
        )
    if bundle.processor is not None and shows_images:
        _check_images(bundle)


def _check_images(bundle: ModelBundle) -> None:
    """Check that images are encoded once and are read in whichever turn they are shown.

    Raises:
        ValueError: They can't.
    """
    facts = bundle.facts
    if facts.image_token_id is None:
        raise ValueError(
            f"model.build.path={bundle.source}: the config of {facts.family} names no token of images; choose another "
            "family"
        )
    if not facts.takes_features:
        raise ValueError(
            f"model.build.path={bundle.source}: transformers' {facts.family} takes no encoded images, and every turn "
            "would encode all of them again; choose another family"
        )
    if facts.position_axes > 3:
        raise ValueError(
            f"model.build.path={bundle.source}: in {facts.family} positions have {facts.position_axes} axes, one of "
            "which numbers the images of all rows, so a turn can't be computed by itself; choose another family"
        )


@cache
def log_once(path: str, note: str) -> None:
    """Log a line on a model once in a run: a critic may have the same model, and ranks have."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        log.info("model.build.path=%s: %s", path, note)


def describe_pretrained(
    config: PretrainedConfig,
    *,
    dtype: str = "float32",
    attn_implementation: str | dict[str, str] = "auto",
    max_tokens: int | None = None,
    seed: int = 0,
    **trained: Any,
) -> PreTrainedModel:
    """Build the model that `load_pretrained` would load, with new weights. Nothing is read.

    Args:
        config: Config of the model, changed as `load_pretrained` changes it.
        dtype: Type of the weights.
        attn_implementation: Attention of transformers. Flash attention becomes `sdpa`, which keeps as much for the
            backward pass and runs anywhere.
        max_tokens: Tokens of the longest conversation.
        seed: Seed of the adapters' weights.
        trained: Which weights are trained; see `load_pretrained`.
    """
    adapt_config(config, max_tokens=max_tokens)
    by_part = (
        attn_implementation if isinstance(attn_implementation, dict) else {"": attn_implementation}
    )
    attention = {
        part: "sdpa" if name == "auto" or name.startswith("flash") else name
        for part, name in by_part.items()
    }
    model: PreTrainedModel = model_class(config).from_config(
        config,
        dtype=getattr(torch, dtype),
        attn_implementation=attention.get("", attention),
    )
    if attn_implementation == "auto":
        pack_images(model)
    adapt_model(model, max_tokens=max_tokens)
    with weights_seeded(seed):
        choose_trained_weights(model, **trained)
    return model.eval()
