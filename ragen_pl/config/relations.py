"""Settings of different nodes that have to agree. Constructors check those of one node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec

from omegaconf import DictConfig, ListConfig, OmegaConf


def relation_problems(cfg: DictConfig) -> Iterator[str]:
    """Yield one line for each group of settings that do not agree."""
    for relation in (
        _demonstrator,
        _response_and_context,
        _left_out_patches,
        _left_out_turns,
        _left_out_ahead,
        _native,
        _ranks,
        _size,
        _float16,
        _flash_attention,
        _masks_of_engine,
        _adapter_dropout,
        _reference,
        _critic,
        _microbatches,
        _sharded_weights,
        _fsdp2,
        _vllm,
    ):
        if (message := relation(lambda key: OmegaConf.select(cfg, key))) is not None:
            yield message


def ranks_asked_for(cfg: DictConfig) -> int:
    """Return the number of processes of the Trainer; 1 if it depends on the machine."""
    return _rank_count(
        OmegaConf.select(cfg, "trainer.devices"), OmegaConf.select(cfg, "trainer.num_nodes")
    )


def _rank_count(devices: object, nodes: object) -> int:
    count = len(devices) if isinstance(devices, ListConfig) else devices
    if not isinstance(count, int) or count < 1:
        return 1
    return count * nodes if isinstance(nodes, int) else count


def strategy_name(strategy: object) -> str:
    """Return the name of a strategy, or of its class, in small letters."""
    target = strategy.get("_target_") if isinstance(strategy, DictConfig) else strategy
    return str(target).rpartition(".")[2].lower()


def is_fsdp2(strategy: object) -> bool:
    """Return whether `trainer.strategy` is FSDP2."""
    return strategy_name(strategy).startswith("fsdp2")


_Get = Callable[[str], object]
# gradients of weights that some ranks have not used
_TORCH_OF_FSDP2 = (2, 13)


def _demonstrator(get: _Get) -> str | None:
    demonstrator = get("warm_start.demonstrator")
    if get("warm_start.enabled") and (
        not isinstance(demonstrator, DictConfig) or "_target_" not in demonstrator
    ):
        return (
            "warm_start.demonstrator has no _target_, the policy that plays; set warm_start/demonstrator=random "
            "or noisy, or warm_start=none"
        )
    return None


def _response_and_context(get: _Get) -> str | None:
    response, budget = get("rollout.max_response_tokens"), get("context.max_tokens")
    if isinstance(response, int) and isinstance(budget, int) and response >= budget:
        return (
            f"rollout.max_response_tokens={response}: leaves no room for a prompt in "
            f"context.max_tokens={budget}; make this one larger"
        )
    return None


def _left_out_patches(get: _Get) -> str | None:
    patches = get("context.leave_out.patches")
    if patches and get("env.visual") is False:
        return (
            f"context.leave_out.patches={patches}: env.visual=false shows no images; set patches=0"
        )
    return None


def _left_out_turns(get: _Get) -> str | None:
    turns, window = get("context.leave_out.turns"), get("context.window")
    if (
        isinstance(turns, float)
        and turns
        and isinstance(window, int)
        and int(turns * (window - 1)) == 0
    ):
        return (
            f"context.leave_out.turns={turns}: of the old turns in context.window={window} that is none; "
            "set context.window=all, or turns=0"
        )
    return None


def _left_out_ahead(get: _Get) -> str | None:
    if get("rollout.iterations_ahead") and (
        get("context.leave_out.patches") or get("context.leave_out.turns")
    ):
        return (
            "rollout.iterations_ahead=1: the scores of context.leave_out are computed on the weights that are trained; "
            "set context.leave_out.patches=0 context.leave_out.turns=0, or rollout.iterations_ahead=0"
        )
    return None


def _native(get: _Get) -> str | None:
    if get("env.prompt_format") != "native":
        return None
    if get("context.leave_out.patches") or get("context.leave_out.turns"):
        return (
            "env.prompt_format=native: no part of its prompts is left out; set context.leave_out.patches=0 "
            "context.leave_out.turns=0, or env.prompt_format=free_think"
        )
    if get("endpoint") is not None:
        return (
            "env.prompt_format=native: it is the format of the model that is trained, and a model behind an API is "
            "asked for tags; set env.prompt_format=free_think, or endpoint=null"
        )
    return None


def _microbatches(get: _Get) -> str | None:
    tokens, strategy = get("update.tokens_per_microbatch"), get("trainer.strategy")
    if tokens is not None and strategy_name(strategy).startswith("deepspeed"):
        return (
            f"update.tokens_per_microbatch={tokens}: {_named(strategy)} accumulates a fixed number of microbatches; "
            "set null and trainer.accumulate_grad_batches, or another trainer.strategy"
        )
    return None


def _named(strategy: object) -> str:
    return str(strategy["_target_"] if isinstance(strategy, DictConfig) else strategy)


def _sharded_weights(get: _Get) -> str | None:
    """Strategies that gather weights in each forward pass, of which ranks run different numbers in a rollout."""
    strategy = get("trainer.strategy")
    name = strategy_name(strategy)
    stage = strategy.get("stage") if isinstance(strategy, DictConfig) else None
    deepspeed = name.startswith("deepspeed") and ("stage_3" in name or stage == 3)
    if deepspeed or (name.startswith("fsdp") and not is_fsdp2(strategy)):
        return (
            f"trainer.strategy={_named(strategy)}: its ranks would wait for each other in a rollout, where they sample "
            "different numbers of tokens; set trainer.strategy=fsdp2, which gathers the weights once a rollout"
        )
    if name == "modelparallelstrategy":
        return (
            f"trainer.strategy={_named(strategy)}: it shards layers in ways that this trainer's modules do not "
            "describe, and writes folders for checkpoints; set trainer.strategy=fsdp2"
        )
    return None


def _fsdp2(get: _Get) -> str | None:
    """Limits of FSDP2's sharded weights."""
    if not is_fsdp2(get("trainer.strategy")):
        return None
    installed = version("torch")
    if tuple(map(int, installed.split(".")[:2])) < _TORCH_OF_FSDP2:
        return (
            f"trainer.strategy=fsdp2: needs torch {'.'.join(map(str, _TORCH_OF_FSDP2))} and found {installed}; "
            "pip install -U torch, or set trainer.strategy=ddp"
        )
    if get("trainer.precision") in ("16-mixed", "16", 16):
        return (
            f"trainer.precision={get('trainer.precision')}: FSDP2 takes no scaled loss; set "
            "trainer.precision=bf16-mixed"
        )
    if str(get("optimizer._target_")).startswith(("bitsandbytes.", "ragen_pl.muon.")):
        return (
            f"optimizer._target_={get('optimizer._target_')}: it can't step sharded weights; set "
            "optimizer._target_=torch.optim.AdamW or torchao.optim.AdamW8bit"
        )
    if get("context.leave_out.patches") or get("context.leave_out.turns"):
        return (
            "context.leave_out: its scores are computed on the trainer's weights, which FSDP2 shards; set "
            "context.leave_out.patches=0 context.leave_out.turns=0, or trainer.strategy=ddp"
        )
    return None


# arguments by which vLLM splits a model or its requests over processes of its own
_SPLITS = ("pipeline_parallel_size", "data_parallel_size")


def _splits(get: _Get) -> str | None:
    """How ranks may share an engine on vLLM in the trainer's process."""
    for key in _SPLITS:
        if (parts := get(f"rollout.engine.settings.{key}")) not in (None, 1):
            return (
                f"rollout.engine.settings.{key}={parts}: ranks share an engine by tensor_parallel_size, and groups of "
                "them have engines of their own; leave it out, or set rollout/engine=vllm_server"
            )
    parts = get("rollout.engine.settings.tensor_parallel_size")
    if parts is None:
        return None
    if not isinstance(parts, int) or parts < 1:
        return f"rollout.engine.settings.tensor_parallel_size={parts}: expected a whole number, at least 1"
    devices = get("trainer.devices")
    # others depend on the machine
    is_known = devices is None or isinstance(devices, ListConfig)
    if not is_known and not (isinstance(devices, int) and devices > 0):
        return None
    ranks = _rank_count(devices, get("trainer.num_nodes"))
    if ranks % parts:
        return (
            f"rollout.engine.settings.tensor_parallel_size={parts}: so many ranks share an engine, expected a divisor "
            f"of their number, {ranks}; set it to 1, other trainer.devices, or rollout/engine=vllm_server"
        )
    return None


# it refuses higher ones, and raises lower ones to the limit without a word (0.32)
_VLLM_TEMPERATURES = (0.01, 2.0)


def _vllm_temperatures(get: _Get) -> str | None:
    """Temperatures outside of those that vLLM samples at."""
    lowest, highest = _VLLM_TEMPERATURES
    for key in (
        "rollout.temperature",
        "rollout.adaptive_temperature.low",
        "rollout.adaptive_temperature.high",
    ):
        value = get(key)
        if isinstance(value, int | float) and not lowest <= value <= highest:
            return (
                f"{key}={value}: vLLM samples at temperatures from {lowest} to {highest:g}; set one of these, or "
                "rollout/engine=transformers"
            )
    return None


def _vllm(get: _Get) -> str | None:
    """Requirements and limits of vLLM."""
    engine = str(get("rollout.engine._target_")).rpartition(".")[2]
    if engine not in ("VLLMEngine", "VLLMServerEngine"):
        return None
    if find_spec("vllm") is None and engine == "VLLMEngine":
        return (
            "rollout/engine=vllm: vllm is not installed; python -m ragen_pl.install_vllm (docs/engines.md), or set "
            "rollout/engine=transformers"
        )
    if find_spec("vllm") is None and not (
        get("rollout.engine.urls") or get("rollout.engine.python")
    ):
        return (
            "rollout.engine.urls=[]: vllm is not installed, so the run can't start a server; python -m "
            "ragen_pl.install_vllm (docs/engines.md), or set rollout.engine.python, or rollout.engine.urls to servers"
        )
    if (
        engine == "VLLMServerEngine"
        and not get("rollout.engine.urls")
        and get("trainer.num_nodes") not in (None, 1)
    ):
        return (
            f"rollout.engine.urls=[]: the run starts a server that its own machine reaches only, and trainer.num_nodes="
            f"{get('trainer.num_nodes')}; start servers and give their addresses"
        )
    if engine == "VLLMServerEngine" and get("rollout.engine.urls"):
        for key in ("settings", "python"):
            if get(f"rollout.engine.{key}"):
                return (
                    f"rollout.engine.{key}: the servers in rollout.engine.urls are started already; set null, and "
                    "their arguments where they are started"
                )
    if engine == "VLLMEngine" and (problem := _splits(get)) is not None:
        return problem
    if (problem := _vllm_temperatures(get)) is not None:
        return problem
    if str(get("model.build._target_")).endswith(".build_small_vlm"):
        return (
            "model=small_vlm: vLLM does not know this architecture; set rollout/engine=transformers, or a pretrained "
            "model"
        )
    if get("context.leave_out.patches") or get("context.leave_out.turns"):
        return (
            "context.leave_out: vLLM shows whole prompts; set context.leave_out.patches=0 context.leave_out.turns=0, "
            "or rollout/engine=transformers"
        )
    return None


def _size(get: _Get) -> str | None:
    size, sizes = get("model.size"), get("model.sizes")
    if isinstance(sizes, DictConfig) and size not in sizes:
        return f"model.size={size}: expected one of {', '.join(map(str, sizes))}"
    return None


def _ranks(get: _Get) -> str | None:
    ranks = _rank_count(get("trainer.devices"), get("trainer.num_nodes"))
    episodes = get("warm_start.episodes")
    if get("warm_start.enabled") and isinstance(episodes, int) and episodes < ranks:
        devices, nodes = get("trainer.devices"), get("trainer.num_nodes")
        return (
            f"warm_start.episodes={episodes}: fewer than the {ranks} ranks of trainer.devices={devices} "
            f"trainer.num_nodes={nodes}; set at least {ranks}"
        )
    return None


def _float16(get: _Get) -> str | None:
    """Gradients in float16 underflow without a scaled loss, which needs trained weights in float32."""
    if get("algorithm") is None or get("model.build.dtype") != "float16":
        return None
    if get("model.build.lora") is None:
        return (
            "model.build.dtype=float16: the gradients of float16 weights underflow; set model.build.dtype=bfloat16, "
            "or model.build.dtype=float32 trainer.precision=16-mixed"
        )
    if get("trainer.precision") not in ("16-mixed", "16", 16):
        return (
            f"model.build.dtype=float16: gradients through it underflow with trainer.precision="
            f"{get('trainer.precision')}; set trainer.precision=16-mixed, or model.build.dtype=bfloat16"
        )
    return None


def _flash_attention(get: _Get) -> str | None:
    """Flash attention computes on a GPU, in 16 bits."""
    attention = get("model.build.attn_implementation")
    parts = attention.values() if isinstance(attention, DictConfig) else [attention]
    if not any(str(part).startswith("flash_") for part in parts):
        return None
    named = f"model.build.attn_implementation={attention}"
    if get("trainer.accelerator") == "cpu" or get("device") == "cpu":
        return f"{named}: flash attention needs a GPU; set model.build.attn_implementation=sdpa"
    if get("model.build.dtype") == "float32" and str(get("trainer.precision")) not in _AUTOCAST:
        return (
            f"{named}: flash attention computes in 16 bits, and model.build.dtype=float32; set "
            "model.build.dtype=bfloat16, or trainer.precision=bf16-mixed for a training run"
        )
    return None


# precisions of the Trainer in which float32 weights are computed on in 16 bits
_AUTOCAST = ("bf16-mixed", "bf16", "16-mixed", "16")


def _masks_of_engine(get: _Get) -> str | None:
    """The in-process engine pads prompts on the left, which needs attention with masks."""
    attention = get("model.build.attn_implementation")
    if isinstance(attention, DictConfig):
        attention = attention.get("text_config", attention.get("", "sdpa"))
    engine = str(get("rollout.engine._target_")).rpartition(".")[2]
    if engine != "TransformersEngine" or attention in (None, "sdpa", "eager"):
        return None
    return (
        f"model.build.attn_implementation={attention}: the in-process rollout engine pads prompts, and this attention "
        "takes no masks; set sdpa, {text_config: sdpa, vision_config: flash_attention_2}, or another rollout/engine"
    )


def _adapter_dropout(get: _Get) -> str | None:
    dropout = get("model.build.lora.lora_dropout")
    if get("algorithm") is None or not dropout:
        return None
    return (
        f"model.build.lora.lora_dropout={dropout}: an update with dropout would be compared with old log-probs "
        "without; set lora_dropout=0.0"
    )


def _reference(get: _Get) -> str | None:
    target = str(get("algorithm.loss.kl.reference._target_"))
    if target.endswith(".AdaptersOff") and get("model.build.lora") is None:
        return (
            "algorithm.loss.kl.reference=AdaptersOff: model.build.lora=null has no adapters to switch off; set "
            "model.build.lora, or use FrozenCopy"
        )
    return None


def _critic(get: _Get) -> str | None:
    kind = get("algorithm.critic")
    if get("critic.build") is not None and kind != "own":
        return f"critic.build: algorithm.critic={kind} has no model of its own; set algorithm.critic=own"
    if get("critic.detach") and kind != "shared":
        return f"critic.detach=true: algorithm.critic={kind} has no trunk in common with the policy; set false"
    return None
