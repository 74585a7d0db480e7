"""A teacher for on-policy distillation: another model of the same tokenizer as the reference policy."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from ragen_pl.algorithms.kl import KLEstimator
from ragen_pl.assembly.build import build_bundle
from ragen_pl.assembly.weights import load_bundle, load_weights
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count
from ragen_pl.base.run_facts import RunFacts
from ragen_pl.chat_formats.template_source import template_source
from ragen_pl.config.errors import ConfigError, config_errors
from ragen_pl.config.nodes import plain
from ragen_pl.config.own_files import is_own, is_own_folder
from ragen_pl.config.trust import check_folder, check_settings
from ragen_pl.data.settings import UpdateSettings
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.positions import check_length
from ragen_pl.models.pretrained import describe_pretrained, load_tokenizer, read_config
from ragen_pl.modules.losses import UpdateLoss
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.modules.reference import FrozenCopy, ReferencePolicy
from ragen_pl.tracking.checkpoints import Checkpoint, find_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

_KEY = "algorithm.loss.kl.reference"
_PRETRAINED = "ragen_pl.models.build.load_pretrained"
# arguments of `load_pretrained`: where a model is looked for, and what else says nothing about shapes
_PLACE = ("local_files_only", "revision", "trust_remote_code")
_OF_LOADING = ("_target_", "path", "image_processor", *_PLACE)


@checked
@dataclass(kw_only=True)
class Teacher:
    """Another model, with frozen weights (on-policy distillation, Agarwal et al., 2024, arXiv 2306.13649).

    It scores the samples of the policy on the same ids, so its tokenizer has to be the policy's. Sizes and family may
    differ. It is read from `path` at every start of the run; checkpoints hold a fingerprint of it.

    Attributes:
        path: Checkpoint or folder of a run, whose last checkpoint is taken, or Hugging Face folder.
        average: Further checkpoints of the same model; the teacher's weights are the mean of theirs and of those of
            `path`, which is a checkpoint then.
        max_tokens: Tokens of the longest conversation; None for any.
        trust: Whether settings of somebody else that come with the teacher are taken as they are.

    Raises:
        ConfigError: There is no such model or checkpoint, or its settings are somebody else's and name code.
    """

    needs_trust = ("path", "average")

    path: str
    average: list[str] = field(default_factory=list)
    max_tokens: Count | None = None
    trust: bool = False

    def __post_init__(self) -> None:
        """Find the teacher and check its settings. No weights are read."""
        _ = self._settings
        if self.average and self._found.is_folder:
            raise ConfigError(
                f"{_KEY}.average: {self._place} is a Hugging Face folder; give checkpoints of a run, whose weights can "
                "be averaged"
            )
        _ = self._averaged

    @property
    def _place(self) -> str:
        return f"{_KEY}.path={self.path}"

    @cached_property
    def _found(self) -> Checkpoint:
        if not Path(self.path).expanduser().exists():
            raise ConfigError(
                f"{self._place}: there is no such file or folder; give a checkpoint or the folder of a run, or a "
                "Hugging Face folder"
            )
        return find_checkpoint(self.path, root=".", key=f"{_KEY}.path")

    @cached_property
    def _averaged(self) -> list[Path]:
        """Files of the further checkpoints."""
        key = f"{_KEY}.average"
        for one in self.average:
            if not Path(one).expanduser().is_file():
                raise ConfigError(
                    f"{key}={self.average}: {one} is no file; give checkpoints of the teacher's run, such as "
                    "runs/teacher/checkpoints/best.ckpt"
                )
        return [find_checkpoint(one, root=".", key=key).path for one in self.average]

    @cached_property
    def _settings(self) -> DictConfig:
        """Settings that the model is built with: the nodes `model` and `env`."""
        found = self._found
        settings = {key: found.settings().get(key, {}) for key in ("model", "env")}
        if not (self.trust or is_own_folder(found.settings_file)):
            check_folder(found.folder, key=self._place, is_model=found.is_folder)
        if not (self.trust or found.is_folder or is_own(found.settings_file)):
            check_settings(settings, file=found.settings_file, given=None)
        if found.is_folder:
            build = {
                "_target_": _PRETRAINED,
                "path": str(found.path),
                "local_files_only": True,
                "max_tokens": self.max_tokens,
            }
            return OmegaConf.create({"model": {"build": build}, "env": settings["env"]})
        if not settings["model"]:
            raise ConfigError(
                f"{self._place}: no run's config.yaml next to it, which says how the model is built; give a checkpoint "
                "in the folder of its run, or the folder that ragen_pl.export makes of it"
            )
        return OmegaConf.create(settings)

    def check(self, policy: ModelBundle) -> None:
        """Check that the teacher reads the policy's ids as the policy does. No weights are read.

        Args:
            policy: The policy's model.

        Raises:
            ConfigError: Its tokenizer is another.
        """
        with config_errors(self._place):
            build = self._settings.model.build
            if build._target_ == _PRETRAINED:
                where = {key: build[key] for key in _PLACE if build.get(key)}
                tokenizer = load_tokenizer(build.path, **where)
            else:
                with torch.device("meta"):
                    tokenizer = build_bundle(self._settings).tokenizer
        self._refuse(policy.token_difference(tokenizer))

    def check_run(self, facts: RunFacts) -> None:
        """Check that the loss takes its gradient from the teacher.

        Raises:
            ValueError: It does not.
        """
        check_estimator(facts)

    def build(self, policy: PolicyModule) -> ReferencePolicy:
        """Return the teacher, which scores the ids that the policy can sample.

        Raises:
            ConfigError: It can't be read, or reads other ids or images than the policy.
        """
        student = policy.bundle
        with config_errors(self._place):
            if student.device.type == "meta":
                model, own = self._described(student), None
            else:
                own = self._loaded(student)
                model = own.model
            note = check_length(model, max_tokens=self.max_tokens)
        if own is not None:
            self._refuse(student.token_difference(own.tokenizer) or student.image_difference(own))
            if template_source(own.renderer) != template_source(student.renderer):
                log.warning(
                    f"{self._place}: its chat template is not the policy's, so it reads prompts and ends of responses "
                    "that it may not have been trained on"
                )
        if note is not None:
            log.info(f"{self._place}: {note}")
        _fit_head(model, student.logit_count)
        # ids that end a response are not banned
        model.generation_config = student.model.generation_config
        teacher = ModelBundle(
            model,
            student.tokenizer,
            student.processor,
            student.image_settings,
            calls_tools=student.calls_tools,
            shares_prefix=student.shares_prefix,
            packs_rows=student.packs_rows,
        )
        frozen = PolicyModule(teacher, update=UpdateSettings(logits_mib=policy.logits_mib))
        frozen.requires_grad_(False)
        return frozen.eval()

    def store(self, reference: ReferencePolicy, policy: PolicyModule, dtype: torch.dtype) -> None:
        """Cast the decoder's matrices, as those of a `FrozenCopy`."""
        FrozenCopy().store(reference, policy, dtype)

    def follow(self, reference: ReferencePolicy, policy: PolicyModule) -> None:
        """Do nothing."""

    def _refuse(self, difference: str | None) -> None:
        if difference is not None:
            raise ConfigError(
                f"{self._place}: {difference}, and the teacher scores the policy's ids; give a model with the policy's "
                "tokenizer, or train on texts that the teacher has written"
            )

    def _loaded(self, student: ModelBundle) -> ModelBundle:
        found, settings = self._found, plain(self._settings)
        if found.is_folder:
            settings["model"]["build"]["dtype"] = _dtype_of(student)
        run = None if found.run is None else str(found.run)
        settings |= {"source": {"checkpoint": str(found.path), "run": run}, "trust": self.trust}
        bundle = load_bundle(OmegaConf.create(settings))
        if self._averaged:
            _average_weights(bundle, self._averaged)
        return bundle

    def _described(self, student: ModelBundle) -> PreTrainedModel:
        """Return the model on the meta device, for a plan of the memory."""
        build = plain(self._settings.model.build)
        with torch.device("meta"):
            if build["_target_"] != _PRETRAINED:
                return build_bundle(self._settings).model
            config = read_config(build["path"], {"local_files_only": True})
            kept = {key: value for key, value in build.items() if key not in _OF_LOADING}
            return describe_pretrained(config, **({"dtype": _dtype_of(student)} | kept))


def check_estimator(facts: RunFacts) -> None:
    """Check that the loss takes its gradient from a teacher.

    Raises:
        ValueError: It does not.
    """
    kl = facts.loss.kl if isinstance(facts.loss, UpdateLoss) else None
    if kl is not None and kl.estimator is KLEstimator.K1 and not kl.changes_rewards:
        raise ValueError(
            "algorithm.loss.kl.estimator=k1: in the loss its gradient does not depend on the teacher; set "
            "full_reverse or k2, or place=reward, algorithm.loss.policy_coefficient=1.0 and the estimator "
            "ragen_pl.algorithms.advantages.teacher_ratio.TeacherRatio"
        )


@torch.no_grad()
def _average_weights(bundle: ModelBundle, files: Sequence[Path]) -> None:
    """Set a model's weights to the mean of its own and those of checkpoints.

    Raises:
        ConfigError: A file can't be read, or holds another model's weights.
    """
    weights = dict(bundle.model.named_parameters())
    sums = {name: weight.double() for name, weight in weights.items()}
    for file in files:
        load_weights(bundle, file)
        for name, weight in weights.items():
            sums[name] += weight
    for name, weight in weights.items():
        weight.copy_(sums[name] / (1 + len(files)))


def _dtype_of(bundle: ModelBundle) -> str:
    return str(bundle.model.dtype).removeprefix("torch.")


def _fit_head(model: PreTrainedModel, count: int) -> None:
    """Give a model's head this number of logits. Ids that are added or left out have no token and are never sampled."""
    head: nn.Module = model.get_output_embeddings()
    for name, weight in list(head.named_parameters(recurse=False)):
        rows = weight.detach()[:count]
        missing = count - len(rows)
        if missing or len(weight) > count:
            rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
            setattr(head, name, nn.Parameter(rows, requires_grad=False))
