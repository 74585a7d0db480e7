"""The rollout engine on vLLM, in the trainer's process and on its device.

vLLM samples with a copy of the policy. The weights of the copy are replaced in place whenever the policy has changed.
Requests join and leave vLLM's batch at any token, so environments step while other responses are still sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Annotated, Any, Literal

import numpy as np
import torch

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count, Fraction, Open
from ragen_pl.base.distributed import world_size
from ragen_pl.base.files import OwnFolder
from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.protocol import (
    EngineMemory,
    EnginePolicy,
    Generation,
    GenerationRequest,
    RolloutSizes,
)
from ragen_pl.engines.vllm.isolation import (
    by_gloo,
    isolated,
    process_groups_kept,
    start_environment,
)
from ragen_pl.engines.vllm.lockstep import Lockstep
from ragen_pl.engines.vllm.model import (
    CPU_CACHE_BYTES,
    check_weights,
    model_arguments,
    save_without_weights,
)
from ragen_pl.engines.vllm.read_back import ReadBack
from ragen_pl.engines.vllm.requests import (
    check_prompt,
    check_request,
    prompt_arguments,
    sampling_arguments,
)
from ragen_pl.engines.vllm.rules import NOT_INSTALLED, VLLMRules, is_installed, split_problem

_MEMORY_FRACTION = 0.4


class VLLMEngine(VLLMRules):
    """Rollout engine that runs vLLM in this process.

    Its log-probs are of the distribution that it samples from, with temperature and banned tokens, as its own kernels
    compute them. Those of a token depend a little on what else is in the batch. Adapters are merged into the weights.

    Where torch.distributed is initialized, every rank has an engine of its own, and all ranks have to build it
    together. With `tensor_parallel_size` in the settings, so many consecutive ranks hold a model together, and sample
    inside `collective_rollout`. Elsewhere vLLM initializes it for this process alone, until `close`. A process has one
    engine at a time.

    Args:
        policy: Policy whose weights are copied by `load_weights`.
        forward_context: Not used: vLLM computes in `dtype`.
        max_tokens: Longest prompt plus response.
        dtype: Type that vLLM computes in; `auto` is that of the policy's weights.
        cache_bytes: Size of the keys and values; None for what `memory_fraction` leaves for them, on the CPU for 1 GiB.
        memory_fraction: Fraction of a GPU's memory for vLLM: its weights, its activations, keys and values.
        eager: Whether no CUDA graphs are captured, which starts faster and samples slower. Always so on the CPU.
        settings: Other arguments of `vllm.LLM`, such as `{"max_num_seqs": 512}`.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
        ValueError: vLLM does not know the model, or can't run it with these settings.
    """

    needs_trust = ("*",)

    @checked
    def __init__(
        self,
        policy: EnginePolicy,
        *,
        forward_context: Callable[[], AbstractContextManager[object]] = nullcontext,
        max_tokens: Count,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        cache_bytes: Count | None = None,
        memory_fraction: Fraction = _MEMORY_FRACTION,
        eager: bool = False,
        settings: Annotated[dict[str, Any], Open()] | None = None,
    ) -> None:
        if not is_installed():
            raise ModuleNotFoundError(NOT_INSTALLED)
        self.ranks = (settings or {}).get("tensor_parallel_size", 1)
        if (problem := split_problem(self.ranks, ranks=world_size())) is not None:
            raise ValueError(problem)
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
        with self._isolated(), start_environment():
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
            "gpu_memory_utilization": memory_fraction,
            "enforce_eager": eager or not self._on_gpu,
            "enable_sleep_mode": self._on_gpu,
            # ids go in and come out
            "skip_tokenizer_init": self.bundle.processor is None,
            "distributed_executor_backend": None if self._owns_group else "external_launcher",
        }
        arguments |= model_arguments(
            self.bundle, dtype=self.dtype, max_tokens=max_tokens, on_gpu=self._on_gpu
        )
        self._llm = self._start(arguments | dict(settings or {}))
        self._read_back = ReadBack(self.dtype, whole=self.ranks == 1)
        self._lockstep = Lockstep.of_group() if self.ranks > 1 else None

    def _start(self, arguments: Mapping[str, Any]) -> Any:
        """Return vLLM's `LLM` with these arguments.

        Raises:
            ValueError: vLLM does not know the model, or can't run it with these settings.
        """
        communicates = by_gloo() if self.ranks > 1 and not self._on_gpu else nullcontext()
        with self._isolated(), start_environment(), communicates:
            from vllm import LLM

            try:
                return LLM(**arguments)
            except (ValueError, TypeError, NotImplementedError) as error:
                self._folder.remove()
                raise ValueError(
                    f"rollout/engine=vllm: vLLM can't run this {self.bundle.facts.family} model "
                    f"({_reason(error)}); set rollout/engine=transformers, or other settings of rollout.engine"
                ) from error

    @classmethod
    def planned_memory(cls, settings: Mapping[str, Any], sizes: RolloutSizes) -> EngineMemory:
        """Return the bytes of weights, keys and values; on a GPU the engine's share of it, which sleeps in updates."""
        cache_bytes: int | None = settings.get("cache_bytes")
        share = settings.get("memory_fraction", _MEMORY_FRACTION)
        if sizes.on_gpu and cache_bytes is None and sizes.device is not None:
            taken = int(share * sizes.device)
        else:
            weights, dtype = sizes.weights, settings.get("dtype", "auto")
            if dtype != "auto":
                size = sizes.bundle.model.dtype.itemsize
                weights = weights * getattr(torch, dtype).itemsize // size
            weights //= (settings.get("settings") or {}).get("tensor_parallel_size", 1)
            taken = weights + (cache_bytes or CPU_CACHE_BYTES)
        # a CPU's memory is not given back by vLLM's sleep mode
        return EngineMemory({"vLLM": taken}, {} if sizes.on_gpu else {"vLLM": taken})

    # ---- weights

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_weights(self, version: int) -> None:
        """Copy the policy's present weights, layer by layer, and drop the caches of older ones.

        Raises:
            RolloutError: vLLM has other weights than it was handed, or has kept what it computed with older ones.
        """
        self.release()
        engine = self._llm.llm_engine
        with self._isolated():
            if self._asleep:
                self._llm.wake_up(tags=["weights"])
            weights = self._read_back.noting(self._policy.weights())
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            if not self._on_gpu:
                self._llm.apply_model(_prepare_head)
            self._read_back.check(self._llm.apply_model)
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

    @property
    def is_idle(self) -> bool:
        """Whether vLLM has no request under way."""
        return not self._llm.llm_engine.has_unfinished_requests()

    def _abort(self, names: list[str]) -> None:
        if self._lockstep is not None and self._lockstep.under_way:
            self._lockstep.abort(names)
            return
        with self._isolated():
            self._llm.llm_engine.abort_request(names)

    def close(self) -> None:
        """End vLLM, and torch.distributed where vLLM has initialized it."""
        self.release()
        groups_kept = nullcontext() if self._owns_group else process_groups_kept()
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
        self._llm.llm_engine.add_request(
            name, prompt_arguments(request.prompt), self._sampling(request)
        )

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
    def collective_rollout(self) -> Iterator[None]:
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

    def _isolated(self) -> AbstractContextManager[None]:
        return isolated(on_gpu=self._on_gpu)


def _prepare_head(model: torch.nn.Module) -> None:
    """Prepare the language-model head for CPU kernels again: after new weights vLLM leaves out a tied one (0.32)."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _reason(error: BaseException) -> str:
    """Return the first line of an error that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # pydantic's first line names the class
    return next((line for line in lines if "error for" not in line), type(error).__name__)[:300]
