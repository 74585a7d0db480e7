"""The rollout engine on vLLM, in the trainer's process and on its device.

vLLM samples with a copy of the policy. The weights of the copy are replaced in place whenever the policy has changed.
Requests join and leave vLLM's batch at any token, so environments step while other responses are still sampled.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
from PIL import Image

from ragen_pl.checked import checked
from ragen_pl.constraints import Count, Fraction, Open
from ragen_pl.distributed import world_size
from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.protocol import EnginePolicy, Generation, GenerationRequest
from ragen_pl.engines.vllm.lockstep import Lockstep, Share
from ragen_pl.files import OwnFolder

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle

CPU_CACHE_BYTES = 2**30
"""Keys and values on the CPU, where vLLM would take most of the machine's memory."""
CPU_BATCH_TOKENS = 4096
"""Tokens of a step there, which vLLM would take itself."""


class VLLMEngine:
    """Rollout engine that runs vLLM in this process.

    Its log-probs are of the distribution that it samples from, with temperature and banned tokens, as its own kernels
    compute them. Those of a token depend a little on what else is in the batch. Adapters are merged into the weights.

    Where torch.distributed is initialized, every rank has an engine of its own, and all ranks have to build it
    together. With `tensor_parallel_size` in the settings, so many consecutive ranks hold a model together, and sample
    inside `taking_part`. Elsewhere vLLM initializes it for this process alone, until `close`. A process has one engine
    at a time.

    Args:
        policy: Policy whose weights are copied by `load_weights`.
        forward_context: Not used: vLLM computes in `dtype`.
        max_tokens: Longest prompt plus response.
        dtype: Type that vLLM computes in; `auto` is that of the policy's weights.
        cache_bytes: Size of the keys and values; None for what `memory_share` leaves for them, on the CPU for 1 GiB.
        memory_share: Share of a GPU's memory for vLLM: its weights, its activations, keys and values.
        eager: Whether no CUDA graphs are captured, which starts faster and samples slower. Always so on the CPU.
        settings: Other arguments of `vllm.LLM`, such as `{"max_num_seqs": 512}`.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
        ValueError: vLLM does not know the model, or can't run it with these settings.
    """

    exact = False
    in_place = False
    asynchronous = False  # vLLM uses the global generators
    continuous = True

    @checked
    def __init__(
        self,
        policy: EnginePolicy,
        *,
        forward_context: Callable[[], AbstractContextManager[object]] = nullcontext,
        max_tokens: Count,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        cache_bytes: Count | None = None,
        memory_share: Fraction = 0.4,
        eager: bool = False,
        settings: Annotated[dict[str, Any], Open()] | None = None,
    ) -> None:
        if find_spec("vllm") is None:
            raise ModuleNotFoundError(
                "rollout/engine=vllm: vllm is not installed; python -m ragen_pl.install_vllm (docs/engines.md), or set "
                "rollout/engine=transformers"
            )
        self.ranks = _ranks_of_a_model(settings or {})
        check_weights(policy.bundle, engine="vllm")
        self.bundle, self._policy = policy.bundle, policy
        self.max_tokens = max_tokens
        self.dtype = self.bundle.model.dtype if dtype == "auto" else getattr(torch, dtype)
        self.version = -1
        self.sampled_tokens = 0
        self.prefilled_tokens = 0
        self._banned = dict.fromkeys(self.bundle.banned_token_ids, float("-inf"))
        self._ends = sorted(self.bundle.eos_token_ids)
        self._sessions: dict[str, GenerationRequest] = {}
        self._requests = 0
        self._asleep = False
        self._on_gpu = False
        self._owns_group = not torch.distributed.is_initialized()
        with self._isolated(), _environment():
            from vllm import LLM
            from vllm.platforms import current_platform
        self._on_gpu = not current_platform.is_cpu()
        if cache_bytes is None and not self._on_gpu:
            cache_bytes = CPU_CACHE_BYTES
        self._folder = OwnFolder("ragen_vllm_model_")
        save_without_weights(self.bundle, self._folder.path)
        arguments = {
            "model": str(self._folder.path),
            "load_format": "dummy",
            "kv_cache_memory_bytes": cache_bytes,
            "gpu_memory_utilization": memory_share,
            "enforce_eager": eager or not self._on_gpu,
            "enable_sleep_mode": self._on_gpu,
            # ids go in and come out
            "skip_tokenizer_init": self.bundle.processor is None,
            "distributed_executor_backend": None if self._owns_group else "external_launcher",
        }
        arguments |= model_arguments(
            self.bundle, dtype=self.dtype, max_tokens=max_tokens, on_gpu=self._on_gpu
        )
        arguments |= dict(settings or {})
        self._lockstep: Lockstep | None = None
        communicates = _by_gloo() if self.ranks > 1 and not self._on_gpu else nullcontext()
        with self._isolated(), _environment(), communicates:
            try:
                self._llm = LLM(**arguments)
            except (ValueError, TypeError, NotImplementedError) as error:
                self._folder.remove()
                raise ValueError(
                    f"rollout/engine=vllm: vLLM can't run this {self.bundle.facts.family} model "
                    f"({_reason(error)}); set rollout/engine=transformers, or other settings of rollout.engine"
                ) from error
        if self.ranks > 1:
            self._lockstep = _lockstep_of_group()

    @classmethod
    def planned_bytes(
        cls, settings: Mapping[str, Any], *, weights: int, device: int | None, on_gpu: bool
    ) -> int:
        """Return the bytes that an engine takes of a device during a rollout, for a plan of the memory.

        Args:
            settings: Arguments of the class.
            weights: Bytes of the policy's weights in the engine's type.
            device: Bytes of the device, None if they are unknown.
            on_gpu: Whether it is a GPU.
        """
        cache_bytes: int | None = settings["cache_bytes"]
        weights //= (settings["settings"] or {}).get("tensor_parallel_size", 1)
        if on_gpu and cache_bytes is None and device is not None:
            return int(settings["memory_share"] * device)
        return weights + (cache_bytes or CPU_CACHE_BYTES)

    # ---- weights

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_weights(self, version: int) -> None:
        """Copy the policy's present weights, layer by layer, and drop the caches of older ones."""
        self.release()
        engine = self._llm.llm_engine
        with self._isolated():
            if self._asleep:
                self._llm.wake_up(tags=["weights"])
            weights = self._policy.weights()
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            if not self._on_gpu:
                self._llm.apply_model(_prepare_head)
            if self._asleep:
                self._llm.wake_up(tags=["kv_cache"])
                self._asleep = False
            if not self._llm.reset_prefix_cache():
                raise RolloutError(
                    "rollout/engine=vllm: it has kept the keys and values of other weights"
                )
            engine.reset_encoder_cache()
        self.version = version

    def sleep(self) -> None:
        """Give back the memory of weights, keys and values on a GPU until `load_weights`."""
        self.release()
        if self._on_gpu and not self._asleep:
            with self._isolated():
                self._llm.sleep(level=2)
            self._asleep = True

    def release(self) -> None:
        """Abort the requests that are under way."""
        if self._sessions:
            self._abort(list(self._sessions))
            self._sessions.clear()

    def _abort(self, names: list[str]) -> None:
        if self._lockstep is not None and self._lockstep.under_way:
            self._lockstep.abort(names)
            return
        with self._isolated():
            self._llm.llm_engine.abort_request(names)

    def close(self) -> None:
        """End vLLM, and torch.distributed where vLLM has initialized it."""
        self.release()
        groups_kept = nullcontext() if self._owns_group else _process_groups_kept()
        with self._isolated(), groups_kept:
            self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        self._folder.remove()

    # ---- responses

    def submit(self, requests: Sequence[GenerationRequest], *, keep: bool) -> None:
        """Hand requests to vLLM, those of ranks that share it at its next step; see `RolloutEngine`.

        Raises:
            ValueError: A request has more tokens than `max_tokens`, or leaves out parts of its images.
        """
        for request in requests:
            check_request(request, max_tokens=self.max_tokens)
        if self._lockstep is not None:
            self._sessions |= self._lockstep.submit(requests)
            return
        with self._isolated():
            for request in requests:
                name = str(self._requests)
                self._requests += 1
                self._add(name, request)
                self._sessions[name] = request

    def collect(self, *, wait: bool = True) -> list[tuple[int, Generation]]:
        """Step vLLM until a response has finished, or once; return those that have finished."""
        finished: list[tuple[int, Generation]] = []
        with self._isolated():
            while self._sessions and not finished:
                if self._lockstep is not None:
                    self._exchange(self._lockstep)
                finished += self._step()
                if not wait:
                    break
        return finished

    def _add(self, name: str, request: GenerationRequest) -> None:
        self._llm.llm_engine.add_request(name, self._prompt(request), self._sampling(request))

    def _step(self) -> list[tuple[int, Generation]]:
        """Step vLLM and return the responses of this rank that have finished."""
        with self._together():
            outputs = [output for output in self._llm.llm_engine.step() if output.finished]
        if self._lockstep is not None:
            for output in outputs:
                self._lockstep.finish(output.request_id, output.outputs[0].token_ids)
        finished = []
        for output in outputs:
            request = self._sessions.pop(output.request_id, None)
            if request is not None:
                finished.append((request.session, self._generation(request, output)))
        return finished

    # ---- ranks that share the engine

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Take part in the rollouts of ranks that share the engine, until those of all have ended.

        Inside another one it does nothing.
        """
        lockstep = self._lockstep
        if lockstep is None or lockstep.under_way:
            yield
            return
        lockstep.begin()
        try:
            yield
            self.release()
            with self._isolated():
                while self._exchange(lockstep, is_done=True):
                    self._step()
        except BaseException as error:
            self._sessions.clear()
            lockstep.fail(error)
            self._abort(list(lockstep.active))
            lockstep.active.clear()
            raise

    def _exchange(self, lockstep: Lockstep, *, is_done: bool = False) -> bool:
        """Hand vLLM the requests of all ranks; return whether to step it."""
        step = lockstep.exchange(is_done=is_done)
        with self._together():
            self._llm.llm_engine.abort_request(step.aborted)
            for name, request in step.requests:
                self._add(name, request)
        return not step.all_done

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Re-raise vLLM's error without a collective: the other ranks raise it too or are inside their step."""
        try:
            yield
        except BaseException:
            if self._lockstep is not None:
                self._lockstep.leave()
            raise

    def _prompt(self, request: GenerationRequest) -> dict[str, Any]:
        prompt = request.prompt
        if not prompt.images:
            return {"prompt_token_ids": prompt.ids.tolist()}
        images = [Image.fromarray(image) for image in prompt.images]
        return {
            "prompt_token_ids": prompt.unexpanded_ids.tolist(),
            "multi_modal_data": {"image": images},
        }

    def _sampling(self, request: GenerationRequest) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            **sampling_arguments(request, ends=self._ends, banned=self._banned),
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _generation(self, request: GenerationRequest, output: Any) -> Generation:
        """Return a finished response.

        Raises:
            ValueError: vLLM has put other ids in the place of the images than the model's own processor.
        """
        shown = output.prompt_token_ids
        check_prompt(shown, request, family=self.bundle.facts.family, engine="vllm")
        (response,) = output.outputs
        ids = np.asarray(response.token_ids, dtype=np.int64)
        self.sampled_tokens += len(ids)
        self.prefilled_tokens += len(shown) - (output.num_cached_tokens or 0)
        return Generation(
            ids=ids,
            logprobs=np.asarray(response.logprobs.logprobs, dtype=np.float32),
            entropy=None,
            hit_length_limit=response.finish_reason == "length",
            version=self.version,
        )

    @contextmanager
    def _isolated(self) -> Iterator[None]:
        """Run vLLM; the global generators and torch's threads are as before afterwards."""
        threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
        python, arrays, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
        gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        # small functions, for which compilers are not worth their time on a CPU
        compilation = nullcontext() if self._on_gpu else torch._dynamo.config.patch(disable=True)
        try:
            with compilation:
                yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)
            torch.set_rng_state(cpu)
            if gpu is not None:
                torch.cuda.set_rng_state(gpu)
            # vLLM replaces the function on a CPU
            torch.set_num_threads = set_num_threads
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


def _ranks_of_a_model(settings: Mapping[str, Any]) -> int:
    """Return the number of ranks that hold a model together.

    Raises:
        ValueError: The ranks of the run can't be divided into such groups.
    """
    ranks: int = settings.get("tensor_parallel_size", 1)
    if ranks > 1 and world_size() % ranks:
        raise ValueError(
            f"rollout.engine.settings.tensor_parallel_size={ranks}: so many ranks share an engine, expected a divisor "
            f"of their number, {world_size()}; set it to 1, or rollout/engine=vllm_server"
        )
    return ranks


def _lockstep_of_group() -> Lockstep:
    """Build the lockstep of the ranks that hold a model together with this one."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()

    def gather(share: Share) -> list[Share]:
        shares: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(shares, share, group=group.cpu_group)
        return shares

    return Lockstep(group.rank_in_group, gather)


@contextmanager
def _by_gloo() -> Iterator[None]:
    """Have the parts of a model on CPUs exchange by gloo.

    vLLM's own way names its shared memory as every other run with a launcher does, and waits for a rank that has ended
    without a limit (0.32).
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    name = "_all_group_ranks_share_shm_group_name"
    own = getattr(CpuCommunicator, name)
    setattr(CpuCommunicator, name, lambda self: False)
    try:
        yield
    finally:
        setattr(CpuCommunicator, name, own)


def _prepare_head(model: torch.nn.Module) -> None:
    """Prepare the language-model head for CPU kernels again: after new weights vLLM leaves out a tied one (0.32)."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


@contextmanager
def _environment() -> Iterator[None]:
    """Set the variables that vLLM reads while it starts."""
    changes = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        changes["VLLM_LOGGING_LEVEL"] = "ERROR"
    if torch.distributed.is_initialized():
        changes |= {
            "RANK": str(torch.distributed.get_rank()),
            "LOCAL_RANK": str(torch.cuda.current_device() if torch.cuda.is_available() else 0),
        }
    before = {name: os.environ.get(name) for name in changes}
    os.environ |= changes
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _process_groups_kept() -> Iterator[None]:
    """Keep vLLM from ending torch.distributed, which the trainer has initialized."""
    from vllm.distributed import parallel_state

    destroy = parallel_state.destroy_distributed_environment
    parallel_state.destroy_distributed_environment = lambda: None
    try:
        yield
    finally:
        parallel_state.destroy_distributed_environment = destroy


def check_weights(bundle: ModelBundle, *, engine: str) -> None:
    """Refuse a model whose weights vLLM can't take over.

    Raises:
        ValueError: They are quantized.
    """
    if "quantization_config" in bundle.model.config.to_dict():
        raise ValueError(
            f"rollout/engine={engine}: quantized weights can't be copied into vLLM after each update; set "
            "rollout/engine=transformers, or load the weights in bfloat16"
        )


def check_request(request: GenerationRequest, *, max_tokens: int) -> None:
    """Refuse a request that vLLM can't answer.

    Raises:
        ValueError: It has more than `max_tokens` with its response, or leaves out parts of its images.
    """
    length = len(request.prompt.ids) + request.max_tokens
    if length > max_tokens:
        raise ValueError(
            f"rollout.engine.max_tokens={max_tokens}: a prompt has {len(request.prompt.ids)} tokens and its "
            f"response may have {request.max_tokens}; set at least {length}"
        )
    if request.prompt.patches is not None:
        raise ValueError(
            "context.leave_out.patches: vLLM shows whole images; set context.leave_out.patches=0, or "
            "rollout/engine=transformers"
        )


def check_prompt(shown: list[int], request: GenerationRequest, *, family: str, engine: str) -> None:
    """Check that vLLM has read a prompt as the trainer does.

    Raises:
        ValueError: It has put other ids in the place of the images than the model's own processor.
    """
    if shown != request.prompt.ids.tolist():
        raise ValueError(
            f"rollout/engine={engine}: vLLM read a prompt as {len(shown)} tokens, the trainer as "
            f"{len(request.prompt.ids)}; it handles images of {family} in another way: set rollout/engine=transformers"
        )


def model_arguments(
    bundle: ModelBundle, *, dtype: torch.dtype, max_tokens: int, on_gpu: bool
) -> dict[str, Any]:
    """Return vLLM's arguments for a model, in this process or on a server."""
    arguments: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": max_tokens,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "mm_processor_kwargs": dict(bundle.image_settings) or None,
    }
    if bundle.processor is not None:
        # else vLLM normalizes images itself, with constants that new weights overwrite (0.32)
        arguments |= {"limit_mm_per_prompt": {"video": 0}, "mm_device_do_normalize": False}
    if not on_gpu:
        # a seeded request can't continue a prompt that was computed in part: CPU generators have no offset (0.32)
        arguments |= {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(max_tokens, CPU_BATCH_TOKENS),
        }
    return arguments


def sampling_arguments(
    request: GenerationRequest, *, ends: list[int], banned: Mapping[int, float]
) -> dict[str, Any]:
    """Return vLLM's sampling parameters for a request.

    Args:
        request: Request.
        ends: Ids that end a response.
        banned: Biases of the ids that are never sampled.
    """
    truncation = request.truncation
    kept = {}
    if truncation is not None:
        kept = {"top_p": truncation.top_p, "min_p": truncation.min_p}
        # 0 for all
        kept["top_k"] = truncation.top_k or 0
    return kept | {
        "temperature": request.temperature,
        "seed": request.seed,
        "max_tokens": request.max_tokens,
        "stop_token_ids": ends,
        # the tokenizer's eos_token is among them
        "ignore_eos": True,
        "logit_bias": banned,
        "logprobs": 0,
        "detokenize": False,
    }


def save_without_weights(bundle: ModelBundle, folder: str | Path) -> None:
    """Write the config, the tokenizer and the processor for vLLM to build the model from."""
    config = copy.deepcopy(bundle.model.config)
    config.architectures = [type(bundle.model).__name__]
    config.save_pretrained(folder)
    (bundle.processor or bundle.tokenizer).save_pretrained(folder)


def _reason(error: BaseException) -> str:
    """Return the first line of an error that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # pydantic's first line names the class
    return next((line for line in lines if "error for" not in line), type(error).__name__)[:300]
