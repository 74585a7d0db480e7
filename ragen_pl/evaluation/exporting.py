"""Write a policy as a Hugging Face folder, with the settings to evaluate it as it was trained.

A folder of the small vision-language model contains the model's code: transformers alone can load it, with
`trust_remote_code=True`.
"""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ragen_pl.assembly.weights import load_bundle
from ragen_pl.base.constraints import path_override
from ragen_pl.base.files import PARTIAL
from ragen_pl.base.finite import first_non_finite
from ragen_pl.config.errors import ConfigError
from ragen_pl.config.nodes import plain
from ragen_pl.config.own_files import write_settings
from ragen_pl.evaluation.settings import HELD_OUT
from ragen_pl.models.adapters import (
    base_is_changed,
    merge_adapters,
    only_adapters_are_trained,
)
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.merging import has_adapters
from ragen_pl.tracking.checkpoints import EXPORTED

log = logging.getLogger(__name__)
CODE_MODULES = ("configuration", "decoder", "modeling", "vision", "processing")
PACKAGE = "ragen_pl.models.small_vlm"
IMPORTED = ("ragen_pl.base.rgb",)

# The `auto_map` entries that name the classes, by file and by the key in it ("" for its top level).
_AUTO_MAPS = {
    "config.json": {
        "": {
            "AutoConfig": "configuration.SmallVLMConfig",
            "AutoModel": "modeling.SmallVLMModel",
            "AutoModelForImageTextToText": "modeling.SmallVLMForConditionalGeneration",
        }
    },
    "processor_config.json": {
        "": {"AutoProcessor": "processing.SmallVLMProcessor"},
        "image_processor": {"AutoImageProcessor": "processing.SmallVLMImageProcessor"},
    },
}


def export(cfg: DictConfig) -> Path:
    """Write model, tokenizer, processor and settings, or the adapters alone, and return the folder.

    Raises:
        ConfigError: A weight is not finite, or `adapters` are wanted of a policy that has none, that trained other
            weights too or whose adapters changed the weights under them.
    """
    bundle = load_bundle(cfg)
    spoiled = first_non_finite(dict(bundle.model.named_parameters()))
    if spoiled is not None:
        raise ConfigError(
            f"ckpt={cfg.ckpt}: its weight {spoiled} is not finite, so nothing is written; give an earlier checkpoint"
        )
    folder = Path(cfg.to).expanduser().absolute()
    if cfg.adapters:
        return _export_adapters(bundle, folder)
    merged = has_adapters(bundle.model)
    merge_adapters(bundle.model)
    with _whole_folder(folder) as partial:
        bundle.save(partial)
        if type(bundle.model).__module__.startswith(PACKAGE):
            _copy_code(partial)
        settings = OmegaConf.to_yaml(_settings(cfg, bundle, merged=merged))
        write_settings(partial / EXPORTED, settings, folder=folder)
    log.info("%-11s%s", "written to", folder)
    place = shlex.quote(path_override("ckpt", folder))
    log.info("%-11s%s", "evaluate", f"python -m ragen_pl.evaluate {place}")
    return folder


def _settings(cfg: DictConfig, bundle: ModelBundle, *, merged: bool) -> DictConfig:
    """Return the settings to evaluate a written policy as it was trained."""
    settings = plain(cfg)
    return OmegaConf.create(
        {
            "run_dir": cfg.source.run,
            "checkpoint": cfg.source.checkpoint,
            "settings": {
                "source": {name: cfg.source[name] for name in HELD_OUT},
                **{name: settings[name] for name in ("env", "context", "rollout")},
                "model": {"build": {"dtype": _dtype(bundle), **_attention(settings)}},
                "validation": {
                    "episodes": cfg.validation.episodes,
                    "baselines": settings["validation"]["baselines"],
                    # A warm start with adapters does not fit the merged model.
                    "warm_start": not merged,
                },
            },
        }
    )


def _export_adapters(bundle: ModelBundle, folder: Path) -> Path:
    """Write the adapters in peft's format, and the tokenizer or processor."""
    if not has_adapters(bundle.model):
        raise ConfigError(
            "adapters=true: the policy has no adapters; leave it out to write the model"
        )
    if not only_adapters_are_trained(bundle.model):
        raise ConfigError(
            "adapters=true: the projector was trained too, and adapters alone would lack it; leave it out"
        )
    if base_is_changed(bundle.model):
        raise ConfigError(
            "adapters=true: the initial values of the adapters have changed the weights under them "
            "(model.build.lora.init_lora_weights), so they do not fit the model that was loaded; leave it out to write "
            "the merged model"
        )
    with _whole_folder(folder) as partial:
        bundle.save(partial)
    base = next(iter(bundle.model.peft_config.values())).base_model_name_or_path
    log.info("%-11s%s", "written to", folder)
    log.info(
        "%-11s%s", "load", f"peft.PeftModel.from_pretrained(model, {str(folder)!r}), for {base}"
    )
    return folder


def _dtype(bundle: ModelBundle) -> str:
    return str(next(bundle.model.parameters()).dtype).removeprefix("torch.")


def _attention(settings: dict[str, Any]) -> dict[str, str]:
    name = settings["model"]["build"].get("attn_implementation")
    return {"attn_implementation": name} if name else {}


def _copy_code(folder: Path) -> None:
    """Copy the small model's modules, and those that they import, into the folder and register its classes there."""
    for module in (*(f"{PACKAGE}.{name}" for name in CODE_MODULES), *IMPORTED):
        source = Path(str(import_module(module).__file__)).read_text(encoding="utf-8")
        for package in (PACKAGE, "ragen_pl.base"):
            source = source.replace(f"from {package}.", "from .")
        (folder / f"{module.rpartition('.')[2]}.py").write_text(source, encoding="utf-8")
    for name, maps in _AUTO_MAPS.items():
        file = folder / name
        config = json.loads(file.read_text(encoding="utf-8"))
        for key, auto_map in maps.items():
            (config[key] if key else config)["auto_map"] = auto_map
        file.write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")


@contextmanager
def _whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder and move what is in it into `folder` at the end of the block.

    An error in the block leaves `folder` as it was.

    Args:
        folder: Folder, which is made; what has the same names in it is replaced.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    # inside, so that it is on the same disk
    partial = Path(tempfile.mkdtemp(suffix=PARTIAL, dir=folder))
    try:
        yield partial
        for path in partial.iterdir():
            target = folder / path.name
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            path.replace(target)
    except BaseException:
        shutil.rmtree(folder if made else partial, ignore_errors=True)
        raise
    partial.rmdir()
