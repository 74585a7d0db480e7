"""From a GGUF file, the format of llama.cpp, to a folder that transformers loads and can train.

transformers reads GGUF but refuses to save such a model: its config says that it is quantized. Here the weights are
dequantized and stored as an ordinary model of the same architecture. The values keep the rounding of the file.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ragen_pl.base.checked import checked
from ragen_pl.models.pretrained import check_loaded, without_reports

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_INSTALL = "pip install 'ragen_pl[gguf]'"
_MAGIC = b"GGUF"
# llama.cpp's names of pre-tokenizers that split text as GPT-2 does
_AS_GPT2 = ("gpt-2", "default")


@dataclass(frozen=True, slots=True)
class ImportedModel:
    """Folder that was written, and its contents.

    Attributes:
        folder: Hugging Face folder.
        architecture: Name of the model's class.
        parameters: Number of parameters; shared ones count once.
        dtype: Type of the weights.
        file_bytes: Size of the GGUF file.
        folder_bytes: Size of the folder's files.
    """

    folder: Path
    architecture: str
    parameters: int
    dtype: str
    file_bytes: int
    folder_bytes: int


@checked
def import_gguf(
    file: str, to: str, *, dtype: Literal["float32", "bfloat16"] = "float32"
) -> ImportedModel:
    """Write a GGUF file's model and tokenizer, with its chat template, as a Hugging Face folder.

    Args:
        file: GGUF file of a language model.
        to: Folder to write.
        dtype: Type of the weights that are written.

    Raises:
        FileNotFoundError: There is no such file.
        ModuleNotFoundError: The packages gguf or accelerate are not installed.
        ValueError: The file is no GGUF file, transformers does not read its architecture or tokenizer, or weights are
            missing.
    """
    path = Path(file).expanduser().absolute()
    if not path.is_file():
        raise FileNotFoundError(f"file={file}: there is no such file; give a GGUF file")
    with path.open("rb") as opened:
        if opened.read(len(_MAGIC)) != _MAGIC:
            raise ValueError(f"file={file}: does not begin with GGUF; give a GGUF file")
    _check_packages()
    folder = Path(to).expanduser().absolute()
    model = _load_model(path, dtype=getattr(torch, dtype))
    tokenizer = _load_tokenizer(path)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ImportedModel(
        folder=folder,
        architecture=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=dtype,
        file_bytes=path.stat().st_size,
        folder_bytes=sum(one.stat().st_size for one in folder.iterdir() if one.is_file()),
    )


def _check_packages() -> None:
    from transformers.utils.import_utils import is_accelerate_available, is_gguf_available

    for name, available in (
        ("gguf", is_gguf_available()),
        ("accelerate", is_accelerate_available()),
    ):
        if not available:
            raise ModuleNotFoundError(
                f"{name} is not installed, and reading a GGUF file needs it; {_INSTALL}"
            )


def _metadata(path: Path) -> dict[str, Any]:
    from transformers.integrations.gguf import read_gguf_metadata

    metadata: dict[str, Any] = read_gguf_metadata(str(path))[0]
    return metadata


def _load_model(path: Path, *, dtype: torch.dtype) -> Any:
    """Return the file's model with its weights dequantized, on the CPU, as a plain model of its class."""
    from transformers import AutoModelForCausalLM, GgufConfig

    architecture = _metadata(path).get("general.architecture", "unknown")
    try:
        with without_reports():
            answer: Any = AutoModelForCausalLM.from_pretrained(
                path.parent,
                gguf_file=path.name,
                dtype=dtype,
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                local_files_only=True,
                trust_remote_code=False,
            )
    except (KeyError, NotImplementedError, ValueError) as error:
        raise ValueError(
            f"file={path.name}: transformers reads no model of the GGUF architecture {architecture!r} "
            f"({type(error).__name__}: {' '.join(str(error).split())[:300]})"
        ) from error
    read, loaded = answer
    check_loaded(loaded, place=f"file={path.name}", remedy="give the whole file")
    model: torch.nn.Module = type(read)(_plain_config(read.config))
    model.to(dtype).load_state_dict(read.state_dict())
    return model


def _plain_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return a config that does not say that the weights are quantized."""
    settings = config.to_dict()
    for name in ("quantization_config", "_model_name_or_path"):
        settings.pop(name, None)
    return type(config).from_dict(settings)


def _load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Return the file's tokenizer, which splits text as the file says."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    # transformers does not know this one: each digit is a token (Allal et al., 2025, arXiv 2502.02737)
    own = {"smollm": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])}
    metadata = _metadata(path)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True, trust_remote_code=False
        )
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"file={path.name}: transformers reads no tokenizer of this file "
            f"({' '.join(str(error).split())[:300]})"
        ) from error
    split = metadata.get("tokenizer.ggml.pre")
    if split in own:
        tokenizer.backend_tokenizer.pre_tokenizer = own[split]
    elif metadata.get("tokenizer.ggml.model") == "gpt2" and split not in (
        *GGUF_PRE_TOKENIZER_SPLITS,
        *_AS_GPT2,
    ):
        warnings.warn(
            f"{path.name}: transformers does not know the pre-tokenizer {split!r} and splits text as GPT-2 does; "
            "compare the tokens of some texts with the original tokenizer's",
            stacklevel=3,
        )
    if tokenizer.chat_template is None:
        warnings.warn(f"{path.name}: has no chat template; save one in the folder", stacklevel=3)
    return tokenizer
