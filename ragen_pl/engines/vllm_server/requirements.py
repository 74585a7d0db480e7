"""Requirements on a vLLM server: its settings, its tokenizer, its chat template and its endpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ragen_pl.engines.vllm.model import CPU_BATCH_TOKENS
from ragen_pl.engines.vllm_server.plugin import BACKEND
from ragen_pl.engines.vllm_server.server import (
    Json,
    RefusedError,
    RequestFailedError,
    Server,
    ServerState,
)
from ragen_pl.models.adapters import largest_rank

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle

_PROBE = "Wo ist das Ziel? <b>3</b> x² ≠ 12,5 目标在哪里\n\n\tdef f(x): return 'é' "
_CHAT = [
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "Right."},
    {"role": "user", "content": "And now?"},
]


@dataclass(frozen=True, slots=True)
class Requirements:
    """Requirements on the servers of a policy.

    Attributes:
        bundle: Model of the policy.
        dtype: Type that the servers compute in.
        max_tokens: Longest prompt plus response.
        pulls: Whether they download weights by HTTP.
        adapters: Whether adapters are handed over alone.
    """

    bundle: ModelBundle
    dtype: torch.dtype
    max_tokens: int
    pulls: bool = False
    adapters: bool = False

    async def check(self, server: Server) -> None:
        """Check a server, which is CHECKED then.

        Raises:
            RefusedError: It can't serve the policy.
            UnavailableError: It does not answer.
        """
        try:
            info = await server.call("GET", "/server_info?config_format=json")
            config = info["vllm_config"]
            for found, flag in self._differences(config):
                raise RefusedError(
                    f"rollout.engine.urls: {server.url} has {found}; start it with {flag}"
                )
            if not config["model_config"]["skip_tokenizer_init"]:
                await check_tokenizer(server, self.bundle, key="rollout.engine.urls")
            await _check_generate(server)
        except RequestFailedError as error:
            raise RefusedError(
                f"rollout.engine.urls: {server.url} is no vLLM server that takes weights and token ids ({error}); "
                "start it as docs/engines.md says, with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out"
            ) from error
        except (KeyError, TypeError, AttributeError) as error:
            raise RefusedError(
                f"rollout.engine.urls: {server.url} answers unlike vLLM 0.32 ({error}); install that version there"
            ) from error
        server.state = ServerState.CHECKED

    def _differences(self, config: Json) -> Iterator[tuple[str, str]]:
        """Yield each setting that does not fit, and the argument that the server's command lacks."""
        model, chunked = config["model_config"], config["scheduler_config"]
        dtype = str(self.dtype).removeprefix("torch.")
        if model["logprobs_mode"] != "processed_logprobs":
            yield f"--logprobs-mode {model['logprobs_mode']}", "--logprobs-mode processed_logprobs"
        if model["dtype"] != str(self.dtype):
            found = model["dtype"].removeprefix("torch.")
            yield f"--dtype {found}", f"--dtype {dtype}, or set rollout.engine.dtype={found}"
        if model["max_model_len"] < self.max_tokens:
            yield f"--max-model-len {model['max_model_len']}", f"--max-model-len {self.max_tokens}"
        if model["quantization"] is not None:
            yield "quantized weights, which can't be replaced", "unquantized ones"
        if config["load_config"]["load_format"] == "dummy":
            yield "--load-format dummy, which reloads no weights", "--load-format auto"
        if config["device_config"]["device"] == "cpu" and chunked["enable_chunked_prefill"]:
            # a seeded request can't continue a prompt that was computed in part there (0.32)
            tokens = max(self.max_tokens, CPU_BATCH_TOKENS)
            flags = f"--no-enable-chunked-prefill --max-num-batched-tokens {tokens}"
            yield "--enable-chunked-prefill, which CPUs have no seeds for", flags
        if self.pulls:
            backend = (config.get("weight_transfer_config") or {}).get("backend")
            if backend != BACKEND:
                wanted = json.dumps({"backend": BACKEND})
                yield f"weight transfer {backend}", f"--weight-transfer-config '{wanted}'"
        if self.adapters:
            yield from self._adapter_differences(config.get("lora_config"))
        if self.bundle.processor is not None:
            yield from self._image_differences(model["multimodal_config"])

    def _adapter_differences(self, found: Json | None) -> Iterator[tuple[str, str]]:
        rank = largest_rank(self.bundle.model)
        if found is None:
            yield "no adapters", f"--enable-lora --max-lora-rank {rank}"
        elif found["max_lora_rank"] < rank:
            yield f"--max-lora-rank {found['max_lora_rank']}", f"--max-lora-rank {rank}"

    def _image_differences(self, images: Json | None) -> Iterator[tuple[str, str]]:
        if images is None:
            yield "a model without images", f"a {self.bundle.facts.family} model"
        elif images["mm_device_do_normalize"]:
            # its constants would be overwritten by new weights (0.32)
            yield "--mm-device-do-normalize", "--no-mm-device-do-normalize"
        elif (images["mm_processor_kwargs"] or {}) != dict(self.bundle.image_settings):
            wanted = json.dumps(dict(self.bundle.image_settings))
            yield (
                f"--mm-processor-kwargs {images['mm_processor_kwargs']}",
                f"--mm-processor-kwargs '{wanted}'",
            )


async def check_tokenizer(server: Server, bundle: ModelBundle, *, key: str) -> None:
    """Compare the vocabulary, how a text is split, and the chat template.

    Args:
        server: A server.
        bundle: Model whose ids the server is to read.
        key: Setting that names the server.

    Raises:
        RefusedError: They are others.
        ServerError: It gives no answer that can be used.
    """
    tokenizer, renderer = bundle.tokenizer, bundle.renderer
    vocabulary = list(bundle.token_ids)
    body: Json = {"prompt": _PROBE, "add_special_tokens": False}
    ids = (await server.call("POST", "/tokenize", body))["tokens"]
    text = (await server.call("POST", "/detokenize", {"tokens": vocabulary}))["prompt"]
    if text != tokenizer.decode(vocabulary) or ids != _ids(tokenizer, _PROBE):
        raise RefusedError(
            f"{key}: {server.url} has another tokenizer than the trainer; start it with the trainer's model, or with "
            "--tokenizer FOLDER"
        )
    if not renderer.chat_template:
        return
    chat = renderer.apply_chat_template(_CHAT, add_generation_prompt=True, tokenize=False)
    body = {"messages": _CHAT, "add_generation_prompt": True}
    if (await server.call("POST", "/tokenize", body))["tokens"] != _ids(tokenizer, chat):
        raise RefusedError(
            f"{key}: {server.url} has another chat template than the trainer; start it with the trainer's model, or "
            "with --chat-template FILE"
        )


async def _check_generate(server: Server) -> None:
    """Check that it takes token ids, without sampling: weights that it has loaded in part would end it."""
    try:
        await server.call("POST", "/inference/v1/generate", {})
    except RequestFailedError as error:
        if error.status not in (400, 422):
            raise


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
