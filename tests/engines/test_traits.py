"""An engine's class says what it is and needs; checks and plans read it there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from support.models.copy_engine import CopyEngine

from ragen_pl.assembly.build import assemble
from ragen_pl.assembly.start_check import checked_engine_factory
from ragen_pl.config import ConfigError, check_config, config_dir
from ragen_pl.config.nodes import plain
from ragen_pl.config.signatures import class_that_defines
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.protocol import EngineTraits
from ragen_pl.engines.vllm.engine import VLLMEngine
from ragen_pl.engines.vllm_server.engine import VLLMServerEngine
from ragen_pl.memory.plan import plan_memory
from ragen_pl.rollout import agreement

ROOT = Path(__file__).parents[2]


class ScaledEngine(CopyEngine):
    """Copy with other weights than the policy's."""

    def load_weights(self, version: int) -> None:
        super().load_weights(version)
        with torch.inference_mode(False), torch.no_grad():
            for weight in self.bundle.model.get_output_embeddings().parameters():
                weight.mul_(3.0)


class OwnEngine:
    """Engine without traits."""

    def __init__(self, policy: object, **settings: object) -> None:
        self.policy = policy


class SingleRankEngine(TransformersEngine):
    """Engine with a rule of its own."""

    @staticmethod
    def config_problems(cfg: DictConfig, *, ranks: int | None):
        yield f"seed={cfg.seed}: found {ranks} ranks; set another"


def composed(engine: type, *overrides: str) -> DictConfig:
    target = f"rollout.engine._target_={engine.__module__}.{engine.__name__}"
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = compose(
            "fit", overrides=["env=frozenlake", "trainer.accelerator=cpu", target, *overrides]
        )
    check_config(cfg)
    return cfg


def built(engine: type) -> TransformersEngine:
    """Build a run's engine with the check at its start; the model is built from its config."""
    components = assemble(composed(engine))
    assert components.bundle.source is None
    components.policy.eval()
    cfg = components.cfg
    build = checked_engine_factory(cfg.rollout.engine, components.proxy, context=plain(cfg.context))
    return build(components.policy)


def test_an_engine_with_a_copy_is_compared_with_the_trainer(monkeypatch):
    compared = []
    check = agreement.check_agreement

    def recorded(context, engine, **settings):
        compared.append(type(engine))
        return check(context, engine, **settings)

    monkeypatch.setattr(agreement, "check_agreement", recorded)
    built(CopyEngine)
    built(TransformersEngine)
    assert compared == [CopyEngine]


def test_a_copy_with_other_weights_ends_the_run_at_its_start():
    with pytest.raises(ConfigError, match=r"log-probs of the rollout engine differ by .* nats"):
        built(ScaledEngine)


def test_the_copy_of_an_engine_is_planned_beside_its_sampling():
    # without a critic, whose weights are not the engine's
    small = ("algorithm=grpo", "rollout.groups=4", "warm_start=none")
    own, copied = (
        plan_memory(composed(engine, *small)).phases for engine in (TransformersEngine, CopyEngine)
    )
    for phase, other in zip(own, copied, strict=True):
        parts = dict(other.parts)
        # the policy has buffers as well
        assert parts.pop("weights of the engine") == pytest.approx(parts["weights"], rel=1e-3)
        assert parts == phase.parts
    assert own[0].parts["keys and values"] > 0


def test_nothing_is_planned_for_an_engine_that_says_nothing():
    small = ("rollout.groups=4", "warm_start=none")
    parts = plan_memory(composed(OwnEngine, *small)).phases[0].parts
    assert not {"keys and values", "weights of the engine", "vLLM"} & set(parts)


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (TransformersEngine, (True, True, False, False)),
        (VLLMEngine, (False, False, False, True)),
        (VLLMServerEngine, (False, False, True, True)),
        (EngineTraits, (False, False, False, False)),
    ],
)
def test_classes_say_what_their_engines_are(engine, expected):
    found = engine.exact, engine.in_place, engine.asynchronous, engine.continuous
    assert found == expected


@pytest.mark.parametrize(
    ("engine", "place"),
    [
        (CopyEngine, "ragen_pl.engines.in_process.rules.InProcessRules"),
        (VLLMEngine, "ragen_pl.engines.vllm.rules.VLLMRules"),
        (VLLMServerEngine, "ragen_pl.engines.vllm_server.rules.VLLMServerRules"),
        (SingleRankEngine, f"{SingleRankEngine.__module__}.SingleRankEngine"),
        (OwnEngine, None),
    ],
)
def test_rules_are_found_without_an_import_of_the_engine(engine, place):
    target = f"{engine.__module__}.{engine.__name__}"
    assert class_that_defines("config_problems", target) == place


@pytest.mark.parametrize("target", ["", "nowhere.Engine", f"{__name__}.built", f"{__name__}.None"])
def test_a_target_that_is_no_class_has_no_rules(target):
    assert class_that_defines("config_problems", target) is None


def test_an_engine_refuses_a_config_by_a_rule_of_its_own():
    with pytest.raises(ConfigError, match=r"^seed=0: found 2 ranks; set another$"):
        composed(SingleRankEngine, "trainer.devices=2", "trainer.strategy=ddp")
    with pytest.raises(ConfigError, match="found None ranks"):
        composed(SingleRankEngine, "trainer.devices=auto")


CHECK = """
import sys
from hydra import compose, initialize_config_dir
from ragen_pl.config import ConfigError, check_config, config_dir
with initialize_config_dir(str(config_dir()), version_base="1.3"):
    for engine in ("transformers", "vllm", "vllm_server"):
        overrides = ["model=qwen2_5", "model.build.attn_implementation=flex_attention", "rollout.temperature=9"]
        cfg = compose("fit", overrides=["env=frozenlake", f"rollout/engine={engine}", *overrides])
        try:
            check_config(cfg)
        except ConfigError as error:
            print(str(error).partition(":")[0])
print(sorted({"torch", "transformers", "vllm"} & set(sys.modules)))
"""


def test_engines_refuse_a_config_without_torch():
    done = subprocess.run(
        [sys.executable, "-c", CHECK], cwd=ROOT, capture_output=True, text=True, check=True
    )
    *refused, loaded = done.stdout.splitlines()
    assert refused[0] == "model.build.attn_implementation=flex_attention"
    assert len(refused) == 3 and loaded == "[]"
