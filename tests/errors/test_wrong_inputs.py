"""Wrong input of a user on the command line is refused in one line with the remedy: exit code 2, no traceback."""

from __future__ import annotations

import json
import re

import pytest

PRETRAINED = "model=pretrained model.build.path=."
SHARDED = "trainer.devices=2 trainer.strategy=fsdp2"
LORA = f"{PRETRAINED} model.build.lora={{r:4}}"
OF_THE_COMMAND = [
    (
        "algorithm.rewards.judge={a:1}",
        "algorithm.rewards.judge={'a': 1}: found a group without _target_, .* set algorithm.rewards.judge._target_=",
    ),
    (
        "rollout.adaptive_temperature={}",
        "rollout.adaptive_temperature={}: found a group without _target_, .* or rollout.adaptive_temperature=null",
    ),
    (
        "context.compaction={max_summary_tokens:32}",
        "context.compaction with context.window=1: .* set context.window=all",
    ),
    (
        "+callbacks.mine={_target_:ragen_pl.rewards.shaping.RewardPlacement}",
        "callbacks.mine: RewardPlacement is no callback of Lightning; derive it from lightning.pytorch.Callback",
    ),
    (
        "+callbacks.collapse.alarms.mine={above:1.0}",
        "callbacks.collapse.alarms.mine={'above': 1.0}: found a group without _target_",
    ),
    (
        "env=bandit warm_start.demonstrator=null",
        "warm_start.demonstrator has no _target_, .* set warm_start/demonstrator=random or noisy",
    ),
    (
        "model.build.text.max_position_embeddings=99999999999999999999",
        "max_position_embeddings=99999999999999999999: expected a whole number, .* at most 16777216",
    ),
    (
        "env.timeout_s=1e20",
        "env.timeout_s=1e\\+20: expected a number, above 0 and at most 1000000.0",
    ),
    ("context.leave_out.patches=-7", "context.leave_out.patches=-7: expected a number, at least 0"),
    ("trainer.max_epoch=3", "unknown key trainer.max_epoch; did you mean trainer.max_epochs?"),
    (
        "env=bandit env.kwargs.nmes=train",
        "unknown key env.kwargs.nmes; did you mean env.kwargs.names?",
    ),
    ("env=frozenlak", "env=frozenlak: no such option; did you mean frozenlake?"),
    ("env=custom", "env.target has no value; set env.target="),
    ("model=pretrained", "model.build.path has no value; set model.build.path="),
    ("seed=1,2", "add --multirun"),
    ("seed", "seed: expected key=value"),
    ("trainer.max_epochs=many", "trainer.max_epochs=many: expected a whole number"),
    ("optimizer.lr=-1", "optimizer.lr=-1: expected a number, at least 0"),
    (
        "optimizer._target_=torch.optim.AdamW +optimizer.momentm=3",
        r"optimizer: AdamW.__init__\(\) got an unexpected keyword argument",
    ),
    (
        "optimizer._target_=torch.optim.AdamX",
        "optimizer._target_=torch.optim.AdamX: torch.optim has no AdamX; did you mean",
    ),
    ("warm_start.optimizer.lr=abc", "warm_start.optimizer.lr=abc: expected a number"),
    ("env=frozenlake_visual model=small_lm", "the model takes no images; set model=small_vlm"),
    (
        "env=frozenlake env.visual=true model=small_vlm",
        "found no image .*; show one after reset, or set ",
    ),
    ("model.build.text.num_attention_heads=3", "expected a divisor of .*hidden_size=128"),
    ("algorithm.critic=none", "BilevelGAE needs values; set algorithm.critic"),
    ("-m seed=0,1 trainer.devices=2", "--multirun with 2 ranks: .* start the runs one by one"),
    ("callbacks.collapse.alarms.entropy.diagnostic=entropy_rato", "did you mean entropy_ratio?"),
    ("warm_start.steps=0", "warm_start.steps=0: expected"),
    ("trainer.precision=bf16-true", "trainer.precision=bf16-true: expected"),
    ("+trainer.gradient_clip_algorithm=value", "gradient_clip_algorithm=value: expected"),
    ("algorithm.loss.kl.aggregation=constant", "kl.aggregation=constant: expected"),
    ("algorithm=grpo rollout.group_size=1", "rollout.group_size=1: .* set at least 2"),
    ("algorithm.loss.policy.aggregation=constant", "a constant goes with aggregation .constant."),
    ("rollout.max_response_tokens=4000", "leaves no room for a prompt in context.max_tokens=2048"),
    ("env=frozenlake context.max_tokens=46", "the first prompt has .* tokens .*; raise it"),
    (
        "optimizer._target_=bitsandbytes.optim.AdamW8bit",
        r"no package .bitsandbytes.; install it \(pip install bitsandbytes",
    ),
    (
        f"{PRETRAINED} model.build.dtype=float16",
        "gradients of float16 weights underflow; set model.build.dtype=bfloat16",
    ),
    (
        f"{LORA} model.build.dtype=float16 trainer.precision=16-mixed model.build.freeze_projector=false",
        "freeze_projector=false: the gradients of its float16 weights underflow; set null, or",
    ),
    (
        f"{LORA} model.build.dtype=float16",
        "underflow with .*precision=32-true; set trainer.precision=16-mixed",
    ),
    (f"{LORA} +model.build.lora.lora_dropout=0.1", "lora_dropout=0.1: .* set lora_dropout=0.0"),
    (f"{LORA} +model.build.lora.bias=all", r"lora\.bias=all: .* leave it out"),
    (f"{LORA} +model.build.lora.peft_type=IA3", r"lora\.peft_type=IA3: adapters are LoRA's"),
    (f"{LORA} +model.build.lora.trainable_token_indices=[5]", r"trainable_token_indices=\[5\]: "),
    (
        f"{PRETRAINED} model.build.attn_implementation=flash_attention_2",
        r"flash_attention_2: .* needs the package flash_attn; install it \(pip install flash-attn\)",
    ),
    (
        f"{PRETRAINED} model.build.attn_implementation={{vision_config:flash_attn}}",
        "attn_implementation.vision_config=flash_attn: expected one of sdpa, eager",
    ),
    (
        f"{PRETRAINED} model.build.attn_implementation=flex_attention",
        "attn_implementation=flex_attention: .* takes no masks; set sdpa",
    ),
    ("critic.lr=-1", "critic.lr=-1: expected a number, at least 0"),
    ("critic.build={_target_:ragen_pl.models.build.build_small_vlm}", "set algorithm.critic=own"),
    (
        "algorithm.loss.kl.reference._target_=ragen_pl.modules.reference.AdaptersOff",
        "model.build.lora=null has no adapters to switch off; .* or use FrozenCopy",
    ),
    ("+trainer.max_time=2h", "trainer.max_time=2h: expected .*such as 00:12:00:00"),
    ("trainer.limit_val_batches=1.5", "trainer.limit_val_batches=1.5: expected"),
    (
        "trainer.limit_val_batches=0.5",
        "limit_val_batches=0.5: is less than one batch, since a validation has 1 .*set a number of batches",
    ),
    (
        "callbacks.collapse.actions=[mitigate] algorithm.loss.policy.clip_high=0.3",
        "mitigation.clip_high=0.28: the loss's own bound is 0.3, .* or null",
    ),
    ("critic.detach=true algorithm.critic=own", "no trunk in common with the policy; set false"),
    (
        "trainer.strategy=deepspeed_stage_2",
        "strategy=deepspeed_stage_2: DeepSpeed .* set trainer.strategy=fsdp2",
    ),
    ("trainer.strategy=fsdp", "strategy=fsdp: its ranks would wait .* set trainer.strategy=fsdp2"),
    (
        "trainer.strategy={_target_:lightning.pytorch.strategies.DeepSpeedStrategy,stage:3}",
        "DeepSpeedStrategy: DeepSpeed .* set trainer.strategy=fsdp2",
    ),
    (
        "trainer.strategy={_target_:lightning.pytorch.strategies.ModelParallelStrategy}",
        "ModelParallelStrategy: .* set trainer.strategy=fsdp2",
    ),
    (
        "trainer.strategy={_target_:ragen_pl.run.strategy.FSDP2Strategy,offload:true}",
        "unknown key trainer.strategy.offload: FSDP2Strategy takes no offload",
    ),
    (
        "trainer.devices=2 trainer.strategy={_target_:ragen_pl.run.strategy.FSDP2Strategy,shard_size:4}",
        "trainer.strategy.shard_size=4: expected a divisor of the 2 ranks",
    ),
    (
        "trainer.timeout_s=60 trainer.rollout_timeout_s=90",
        "rollout_timeout_s=90: .*at most trainer.timeout_s=60",
    ),
    (f"{SHARDED} trainer.precision=16-mixed", "takes no scaled loss; set .*bf16-mixed"),
    (
        f"{SHARDED} algorithm.loss.kl.clip_norm=1",
        "clip_norm=1: .* which FSDP2 shards; set .*clip_norm=null, or trainer.strategy=ddp",
    ),
    (
        "algorithm.loss.kl.clip_norm=1 trainer.precision=16-mixed",
        "clip_norm=1: .* no scaled loss, .* or trainer.precision=bf16-mixed",
    ),
    (
        "algorithm.loss.kl.clip_norm=1 algorithm.loss.kl.place=reward algorithm.loss.kl.estimator=k1",
        "clip_norm=1.*: in the reward .* no gradient of its own; set .*clip_norm=null, or place=loss",
    ),
    (f"{SHARDED} context.leave_out.patches=0.5", "leave_out: .* or trainer.strategy=ddp"),
    (
        f"{SHARDED} optimizer._target_=bitsandbytes.optim.AdamW8bit",
        "can't step sharded weights|no package 'bitsandbytes'",
    ),
    (
        f"{SHARDED} warm_start.optimizer._target_=bitsandbytes.optim.AdamW8bit",
        "^warm_start.optimizer.*(can't step sharded weights|no package 'bitsandbytes')",
    ),
    ("trainer.accelerator=gpu", "trainer: .*; trainer.accelerator=cpu"),
    (
        "env.kwargs.size=40",
        "env.kwargs.size=40: expected a whole number, at least 2 and at most 16",
    ),
    (
        "env.target=no_such_package.Environment",
        "env.target=no_such_package.Environment: .*class path such as",
    ),
    ("ckpt_path=last", "ckpt_path=last: there is no run in .*; start one without ckpt_path"),
    ("ckpt_path=gone.ckpt", "ckpt_path=gone.ckpt: expected a path that exists"),
    ("validation.baselines.optimal._target_=envs.policies.Nobody", "envs.policies has no Nobody"),
    ("callbacks.mine._target_=no_such_package.Mine", r"unknown key callbacks.mine|no package"),
    ("logger=mlflow +logger.uri=http://127.0.0.1:9", "cannot be reached .*; start the server"),
    ("paths.root=/proc/nowhere", "/proc/nowhere.*(may not be written|MB are left)"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), OF_THE_COMMAND, ids=[a for a, _ in OF_THE_COMMAND]
)
def test_a_wrong_command_is_refused(fit, arguments, message):
    assert re.search(message, fit(*arguments.split()).refused())


@pytest.mark.parametrize(
    ("attention", "change", "message"),
    [
        ("{vision_config: flash_attention_2}", "trainer.accelerator=cpu", "needs a GPU; set .*=sdpa"),
        ("{vision_config: flash_attention_2}", "model.build.dtype=float32", "=float32; set .*=bfloat16"),
        ("{text_config: flash_attention_2}", "model.build.dtype=bfloat16", "takes no masks; set sdpa"),
    ],
)  # fmt: skip
def test_flash_attention_that_cannot_run_is_refused(fit, monkeypatch, attention, change, message):
    monkeypatch.setattr("ragen_pl.models.settings.find_spec", lambda name: object())
    refused = fit(*PRETRAINED.split(), f"model.build.attn_implementation={attention}", change)
    assert re.search(message, refused.refused())


def test_a_server_that_does_not_answer_is_refused(fit):
    address = "rollout.engine.urls=[http://127.0.0.1:9]"
    servers = ("rollout/engine=vllm_server", address, "rollout.engine.retries=0")
    message = fit("env=bandit", "algorithm=grpo", "trainer.accelerator=cpu", *servers).refused()
    assert message.startswith("rollout.engine.urls: http://127.0.0.1:9 does not answer (")
    assert "start a server there" in message


def test_a_baseline_that_cannot_play_costs_its_column_only(fit, tmp_path):
    # statements are longer than the limit
    settings = ("env=frozenlake", "env.prompt_format=grounding", "rollout.max_response_tokens=6")
    message = fit(*settings).refused()
    assert message.startswith(
        "rollout.max_response_tokens=6: a scripted response in format grounding"
    )
    done = fit(
        *settings,
        "warm_start=none",
        "+trainer.max_steps=2",
        "paths.run_dir=run",
    )
    assert done.code == 0
    assert (
        "validation.baselines.optimal: not in the summary (rollout.max_response_tokens=6"
        in done.stdout + done.stderr
    )
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert "val/success" in metrics and "optimal_policy/success" not in metrics


def test_replay_refuses_a_checkpoint_with_the_new_way(command):
    refused = command("replay", "ckpt=runs/x/checkpoints/last.ckpt").refused()
    assert "ckpt=runs/x/checkpoints/last.ckpt: the step of a checkpoint is not repeated" in refused
    assert "set batch=FILE of a run's bad_batch or batches folder" in refused
