"""A rollout engine of your own: transformers' `generate`, with one call for all prompts of a length.

cd examples/own_engine
python -m ragen_pl.fit --config-dir conf env=frozenlake rollout/engine=own
"""

from collections import defaultdict
from contextlib import nullcontext

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from ragen_pl.engines.in_process.sampling import Responses, SamplingParameters
from ragen_pl.engines.protocol import EngineTraits


class Draw(LogitsProcessor):
    """Draws the next tokens, each row from its request's seed, and keeps their log-probs."""

    def __init__(self, requests, bundle):
        # temperature and banned tokens come before the draw and the log-probs
        self.sampling = SamplingParameters.of(requests, banned=bundle.banned(bundle.device))
        limits = [request.max_tokens for request in requests]
        self.responses = Responses(limits, eos=bundle.eos_token_ids)
        self.rows, self.step = np.arange(len(requests)), 0

    def __call__(self, input_ids, scores):
        """Leave only the drawn tokens for `generate` to choose."""
        sampled = self.sampling.sample(scores, self.sampling.uniforms[:, self.step])
        self.responses.add(self.rows, sampled)
        self.responses.read()  # `generate` reads each token too
        self.step += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, sampled.tokens[:, None], 0.0)


class GenerateEngine(EngineTraits):
    """Rollout engine that computes every prompt from its first token."""

    exact = in_place = True  # it runs the trainer's own model
    asynchronous = False  # and can't while that is trained
    continuous = False  # all responses of a call are sampled together

    def __init__(self, policy, *, forward_context=nullcontext):
        self.bundle, self.forward_context = policy.bundle, forward_context
        self.dtype, self.version, self.pending = policy.bundle.model.dtype, -1, []

    def load_weights(self, version):
        """Label what follows; the model has the new weights already."""
        self.release()
        self.version = version

    def release(self):
        """Drop what is pending. Sessions leave nothing else behind."""
        self.pending = []

    sleep = close = release

    def submit(self, requests, *, keep):
        """Queue requests."""
        if any(request.prompt.patches is not None for request in requests):
            raise ValueError(
                "rollout/engine=own shows whole images; set context.leave_out.patches=0"
            )
        self.pending += requests

    def collect(self, *, wait=True):
        """Generate the responses to all pending requests."""
        alike = defaultdict(list)
        for request in self.pending:
            alike[len(request.prompt.ids), len(request.prompt.images)].append(request)
        self.pending, finished = [], []
        for requests in alike.values():
            sessions = [request.session for request in requests]
            finished += zip(sessions, self.generate(requests), strict=True)
        return finished

    @torch.inference_mode()
    def generate(self, requests):
        """Return the responses to prompts of equal length and number of images."""
        bundle, draw = self.bundle, Draw(requests, self.bundle)
        ids = torch.from_numpy(np.stack([request.prompt.ids for request in requests]))
        inputs = {"input_ids": ids.to(bundle.device), "attention_mask": torch.ones_like(ids)}
        if requests[0].prompt.images:
            inputs |= bundle.images.inputs([request.prompt.images for request in requests])
            inputs |= bundle.images.token_types(ids, shown=True)
        settings = GenerationConfig(
            do_sample=False,
            repetition_penalty=1.0,  # a checkpoint may ask for another
            max_new_tokens=max(request.max_tokens for request in requests),
            eos_token_id=sorted(bundle.eos_token_ids),
            pad_token_id=bundle.pad_token_id,
        )
        with self.forward_context():
            bundle.model.generate(
                **{name: value.to(bundle.device) for name, value in inputs.items()},
                generation_config=settings,
                logits_processor=LogitsProcessorList([draw]),
            )
        return draw.responses.generations(version=self.version)
