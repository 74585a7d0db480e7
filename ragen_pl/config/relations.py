"""Settings of different nodes that have to agree. Constructors check those of one node.

What an engine needs of the rest of a config its class says, see `ragen_pl.engines.protocol.EngineTraits`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig, ListConfig, OmegaConf

from ragen_pl.config.errors import config_errors
from ragen_pl.config.signatures import class_that_defines


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
        _rollout_limit,
        _size,
        _float16,
        _flash_attention,
        _adapter_dropout,
        _reference,
        _critic,
        _sharded_weights,
        _fsdp2,
    ):
        if (message := relation(lambda key: OmegaConf.select(cfg, key))) is not None:
            yield message
    yield from _engine_problems(cfg)


def _engine_problems(cfg: DictConfig) -> Iterator[str]:
    """Yield what the class of the rollout engine can't run of a config.

    Only the module is imported in which the class, or the nearest of its bases, defines `config_problems`.
    """
    target = OmegaConf.select(cfg, "rollout.engine._target_")
    place = class_that_defines("config_problems", str(target))
    if place is None:
        return
    with config_errors(f"rollout.engine._target_={target}"):
        engine: Any = get_class(place)
        yield from engine.config_problems(cfg, ranks=_known_ranks(cfg))


def _known_ranks(cfg: DictConfig) -> int | None:
    """Return the number of processes of the Trainer; None if it depends on the machine."""
    devices = OmegaConf.select(cfg, "trainer.devices")
    is_count = isinstance(devices, int) and devices > 0
    if not (devices is None or is_count or isinstance(devices, ListConfig)):
        return None
    return _rank_count(devices, OmegaConf.select(cfg, "trainer.num_nodes"))


def ranks_asked_for(cfg: DictConfig) -> int:
    """Return the number of processes of the Trainer; 1 if it depends on the machine."""
    return _known_ranks(cfg) or 1


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


def shard_size(strategy: object) -> int | None:
    """Return the number of ranks that share a copy of the state under FSDP2; None for all."""
    size = strategy.get("shard_size") if isinstance(strategy, DictConfig) else None
    return size if isinstance(size, int) else None


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
    return None


def _named(strategy: object) -> str:
    return str(strategy["_target_"] if isinstance(strategy, DictConfig) else strategy)


def _sharded_weights(get: _Get) -> str | None:
    """Strategies that gather weights in each forward pass, of which ranks run different numbers in a rollout."""
    strategy = get("trainer.strategy")
    name = strategy_name(strategy)
    if name.startswith("deepspeed"):
        return (
            f"trainer.strategy={_named(strategy)}: DeepSpeed asks for the size of a batch before there is a rollout, "
            "and clips and accumulates by itself; set trainer.strategy=fsdp2, which shards the same state"
        )
    if name.startswith("fsdp") and not is_fsdp2(strategy):
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
    size, ranks = (
        shard_size(get("trainer.strategy")),
        _rank_count(get("trainer.devices"), get("trainer.num_nodes")),
    )
    if size is not None and ranks % size and ranks > 1:
        return (
            f"trainer.strategy.shard_size={size}: expected a divisor of the {ranks} ranks; set the number of devices "
            "of a machine"
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


def _rollout_limit(get: _Get) -> str | None:
    rollout, longest = get("trainer.rollout_timeout_s"), get("trainer.timeout_s")
    if isinstance(rollout, int | float) and isinstance(longest, int | float) and rollout > longest:
        return (
            f"trainer.rollout_timeout_s={rollout:g}: expected at most trainer.timeout_s={longest:g}, the limit of the "
            "process group; raise that one"
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
