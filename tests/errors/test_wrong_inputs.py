"""Wrong input of a user is refused in one line with the remedy: exit code 2, no traceback."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from composing import composed
from omegaconf import OmegaConf

from ragen_pl.config import ConfigError
from ragen_pl.environments.check import check_environment
from ragen_pl.run.baselines import warn_of_garbage

HERE = Path(__file__).parent

PRETRAINED = "model=pretrained model.build.path=."
SHARDED = "trainer.devices=2 trainer.strategy=fsdp2"
LORA = f"{PRETRAINED} model.build.lora={{r:4}}"

OF_THE_COMMAND = [
    (
        "algorithm.rewards.judge={a:1}",
        "algorithm.rewards.judge={'a': 1}: found a group without _target_, .* set algorithm.rewards.judge._target_=",
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
    ("env=frozenlake env.visual=true model=small_vlm", "found no image .*; set env.visual=false"),
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
        f"{LORA} model.build.dtype=float16",
        "underflow with .*precision=32-true; set trainer.precision=16-mixed",
    ),
    (f"{LORA} +model.build.lora.lora_dropout=0.1", "lora_dropout=0.1: .* set lora_dropout=0.0"),
    (
        f"{PRETRAINED} model.build.attn_implementation=flash_attention_2",
        r"flash_attention_2: expected .* with flash_attn installed \(pip install flash-attn\)",
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

OF_THE_ENVIRONMENT = [
    ("NoEnvironment", "found a NoEnvironment, expected a gymnasium.Env"),
    ("NumberForText", "returned an observation of type int; expected a str, or a dict"),
    ("NoNames", r"found action_names=\(\), expected a name for each of 2 actions"),
    ("SameNames", "expected names that differ; case does not count"),
    ("NameWithBars", r"expected none of \|\|, <, > in them"),
    ("FourTuple", r"step returned \(str, float, bool, dict\), expected \(observation, reward"),
    ("NaNReward", "returned reward nan; expected a finite number"),
    ("FloatImage", r"type float64; expected uint8 \[height, width, 3\]"),
    ("ResetRaises", r"reset\(seed=0, options=None\) raised: KeyError: 'door'"),
    ("ResetBare", r"reset returned a str, expected \(observation, info\)"),
    ("NoSeed", "unexpected keyword argument 'seed'"),
    ("Unseeded", "two resets with seed 0 began differently; draw from self.np_random"),
    ("Continuous", r"found action_space=Box.*, expected Discrete\(n\) .* or Text\(max_length\)"),
    ("NumberForFreeText", "chose action 3, expected a text"),
    ("Black", "each of its .* images has one colour only"),
    ("OnePicture", "images are equal; check its renderer"),
    ("Growing", "each observation contains the one before it .* or set context.window=1"),
    ("MoreThanDeclared", r"returned reward 1, outside of its reward_range=\(0, 0.5\)"),
    ("RemembersEpisodes", "two episodes with seed 0 and equal actions differ after 1 steps"),
    ("EndsEarlierAgain", "two episodes with seed 0 and equal actions differ after"),
    ("StepRaises", r"step\(0\) raised: the floor gave way"),
    ("Unhelpful", "env.kwargs of broken_environments.Unhelpful: no display"),
    ("ExitsInConstructor", r"its constructor: its code ended the program \(SystemExit: 3\)"),
    ("SecondResetRaises", r"reset\(seed=0, options=None\) raised: no third episode"),
    ("NumberNames", r"found action_names=\(1, 2\), expected texts; quote each name"),
    ("StartsAtOne", r"Discrete\(2, start=1\), expected one that starts at 0.* set Discrete\(2\)"),
    ("WordForSuccess", r"returned info\['success'\]='no'; expected true or false"),
    ("WordForReward", "returned reward '1.0'; expected a finite number"),
    ("NumberDescribed", r"describe\(\) returned a value of type int, expected str"),
    ("NeedsLibrary", "it needs the package 'no_such_library', which is not installed"),
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
    monkeypatch.setattr("ragen_pl.constraints.find_spec", lambda name: object())
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


@pytest.fixture(scope="module")
def custom():
    """The configuration of `env=custom`, composed once."""
    return composed("env=custom", "env.target=set", "logger=none", checked=False)


WITH_IMAGES = ("Black", "OnePicture")


def checked(custom, monkeypatch, root, environment, **settings):
    """Check an environment; it has to be refused or pass without a line break."""
    monkeypatch.syspath_prepend(str(HERE))
    custom = OmegaConf.merge(custom, {"env": {"target": f"broken_environments.{environment}"}})
    custom.paths.root, custom.context.window = str(root), "all"
    custom.env.visual = environment in WITH_IMAGES
    for key, value in settings.items():
        OmegaConf.update(custom, key.replace("__", "."), value)
    check_environment(custom)


@pytest.mark.parametrize(
    ("environment", "message"), OF_THE_ENVIRONMENT, ids=[name for name, _ in OF_THE_ENVIRONMENT]
)
def test_an_environment_that_breaks_the_protocol_is_refused(
    custom, monkeypatch, tmp_path, environment, message
):
    with pytest.raises(ConfigError, match=message) as error:
        checked(custom, monkeypatch, tmp_path, environment)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("environment", "call", "process"),
    [
        ("HangsInConstructor", "its constructor", False),
        ("HangsInConstructor", "its constructor", True),
        ("HangsInReset", "reset(seed=0, options=None)", False),
        ("HangsInStep", "step(0)", False),
        ("HangsInStep", "step(0)", True),
    ],
)
def test_an_environment_that_hangs_is_refused(
    custom, monkeypatch, tmp_path, environment, call, process
):
    # the creation may take ten times as long
    timeout_s = 0.3 if call == "its constructor" else 5.0
    settings = {"env__timeout_s": timeout_s, "env__process": process}
    with pytest.raises(ConfigError) as error:
        checked(custom, monkeypatch, tmp_path, environment, **settings)
    limit = 10 * timeout_s if call == "its constructor" else timeout_s
    assert str(error.value) == (
        f"env.target=broken_environments.{environment}: {call}: the environment took longer than {limit:g} s; "
        f"find out what it waits for, or raise env.timeout_s={timeout_s:g}"
    )


def test_a_state_key_that_holds_nothing_out_is_refused(custom, monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"state_key\(\) differs after two resets with seed 0"):
        checked(custom, monkeypatch, tmp_path, "KeyOfTheObject", validation__held_out=True)
    checked(custom, monkeypatch, tmp_path, "KeyOfTheObject", validation__held_out=False)


def test_an_environment_that_keeps_memory_is_reported(custom, monkeypatch, tmp_path, caplog):
    checked(custom, monkeypatch, tmp_path, "Sound")
    assert "MiB of memory" not in caplog.text
    checked(custom, monkeypatch, tmp_path, "Hoards")
    assert re.search(r"Hoards: each episode keeps about [78] MiB of memory; free it", caplog.text)


def test_garbage_that_earns_more_than_play_is_reported(custom, monkeypatch, tmp_path, caplog):
    checked(custom, monkeypatch, tmp_path, "Sound")
    enough = {"env__format_penalty": 1.1, "env__invalid_ends": False}
    checked(custom, monkeypatch, tmp_path, "EveryStepCosts", **enough)
    assert "without a valid action" not in caplog.text
    checked(custom, monkeypatch, tmp_path, "EveryStepCosts")
    assert (
        "EveryStepCosts: responses without a valid action earn -0.05 an episode, more than the -10 of random play; an "
        "agent may learn to answer nothing; set env.format_penalty=11"
    ) in caplog.text
    warn_of_garbage(-0.05, {"garbage policy": {"return": -0.05}})
    assert "val/return=-0.05: no more than the -0.05 of responses" in caplog.text


@pytest.mark.parametrize(
    ("environment", "process"), [("Sound", False), ("FreeText", False), ("FreeText", True)]
)
def test_a_sound_environment_passes(custom, monkeypatch, tmp_path, environment, process):
    checked(custom, monkeypatch, tmp_path, environment, env__process=process)


def test_an_environment_that_fails_later_on_is_reported(fit):
    line = fit("env=custom", "env.target=broken_environments.ThirdResetRaises").refused()
    assert line == (
        "every demonstration failed; the first with ConnectionError: the simulator has gone"
    )


def test_failed_episodes_are_shown_in_lines_table_and_warnings(fit, tmp_path):
    done = fit(
        "env=custom", "env.target=broken_environments.SomeSeedsBreak", "logger=none", "trainer.max_epochs=2",
        "callbacks.trajectories=null", "callbacks.plots=null", "warm_start.steps=2", "warm_start.episodes=16",
        "rollout.groups=16", "validation.episodes=16", "paths.run_dir=run", "rollout.failures.min_fraction=0.0",
        quick=False,
    )  # fmt: skip
    assert done.code == 0, done.stderr
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    failed, ended = metrics["val/failed_episodes"], metrics["val/episodes"]
    assert 0 < failed < 16 and failed + ended == 16 and metrics["val/failed"] == failed / 16
    # an invalid answer costs 0.05; failed episodes have no return
    assert metrics["random_policy/return"] == metrics["random_policy/success"] == 1.0
    (last,) = (line for line in done.stdout.splitlines() if line.startswith("iteration 2/2"))
    assert re.search(rf"  failed \d of 16  validation failed {failed:.0f} of 16", last)
    rows = [line for line in done.stdout.splitlines() if line.startswith("│")]
    # before, after, random and garbage
    assert sum(f"{failed:.0f} of 16" in row for row in rows) == 4 == len(rows)
    heads = [line.partition("  ")[0] for line in done.stdout.splitlines()]
    assert heads.count("validation before the first iteration") == 1
    assert heads.index("validation before the first iteration") < heads.index("iteration 1/2")
    # once in each of demonstrations, training, validation set
    assert 1 <= done.stdout.count("ConnectionError: no simulator for seed") <= 3


def test_a_run_ends_where_too_many_episodes_fail(fit):
    line = fit(
        "env=custom", "env.target=broken_environments.SomeSeedsBreak", "rollout.failures.min_fraction=1.0",
        "rollout.groups=16", "validation.episodes=16",
    ).refused()  # fmt: skip
    assert re.match(
        r"iteration 1: (\d+) of 16 episodes failed and drop \1 groups; 0.\d+ of the iteration can be trained on, less "
        r"than rollout.failures.min_fraction=1, after it was played twice; most failed with "
        r"ConnectionError: no simulator for seed \d+",
        line,
    )


def test_an_environment_is_not_served_to_everybody(command, monkeypatch):
    monkeypatch.delenv("RAGEN_PL_ENVIRONMENT_KEY", raising=False)
    line = command("serve_environment", "env=frozenlake", "server.host=0.0.0.0").refused()
    assert line.startswith("server.host=0.0.0.0: ") and "set RAGEN_PL_ENVIRONMENT_KEY" in line
    assert "server.sessions=0" in command("serve_environment", "server.sessions=0").refused()


def test_scripted_policies_that_an_environment_does_not_support_are_refused(fit):
    sound = ("env=custom", "env.target=broken_environments.Sound")
    line = fit(*sound, "warm_start/demonstrator=noisy").refused()
    assert line.startswith("warm_start.demonstrator: ") and "no blind_action" in line
    line = fit(
        *sound, "+validation.baselines.optimal._target_=envs.policies.OptimalPolicy"
    ).refused()
    assert line.startswith("validation.baselines.optimal: ") and "optimal_action" in line
    assert "validation.held_out=false" in fit(*sound, "validation.held_out=true").refused()


OF_THE_USERS_FILES = [
    ("env/mine.yaml", "env: [1, 2", r"mine.yaml, line 1: not YAML \(.*\); correct the line"),
    ("env/mine.yaml", "# @package _global_\nenv: {name: a\n  b: c}\n", "mine.yaml, line 3: not YAML"),
    ("env/mine.yaml", "# @package _global_\ndefaults: [custm]\n", "custm"),
    ("env/mine.yaml", "# @package _global_\ndefaults: [custom]\nenv: {max_turn: 3}\n",
     "unknown key env.max_turn; did you mean env.max_turns?"),
    ("env/mine.yaml", "# @package _global_\ndefaults: [custom]\nenv: {max_turns: soon}\n",
     "env.max_turns=soon: expected a whole number"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "message"), OF_THE_USERS_FILES)
def test_a_wrong_file_of_the_users_is_refused(fit, tmp_path, name, text, message):
    file = tmp_path / "conf" / name
    file.parent.mkdir(parents=True)
    file.write_text(text)
    line = fit(
        "--config-dir", "conf", "env=mine", "+env.target=broken_environments.Sound"
    ).refused()
    assert re.search(message, line)


def test_a_folder_that_holds_a_run_is_not_written_over(fit, tmp_path):
    overrides = ("env=frozenlake", "paths.run_dir=mine", "validation.baselines=null")
    config = tmp_path / "mine" / "config.yaml"
    config.parent.mkdir()
    config.write_text("seed: 1\n")  # as a run that was refused leaves it
    assert fit(*overrides, "seed=3").code == 0
    assert "seed: 3" in config.read_text()
    message = fit(*overrides, "seed=4").refused()
    assert message == (
        "paths.run_dir=mine: holds a run already; continue it by ckpt_path=last, or set another folder"
    )
    assert "seed: 3" in config.read_text()


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_NTASKS"])
def test_processes_started_from_outside_must_agree_on_a_folder(fit, monkeypatch, name):
    monkeypatch.setenv(name, "4")
    message = fit("env=frozenlake").refused()
    assert message.startswith("paths.run_dir=null: 4 processes") and message.endswith(
        "set paths.run_dir"
    )


def test_a_folder_in_the_way_is_refused(fit, tmp_path):
    (tmp_path / "file").touch()
    line = fit("env=frozenlake", "paths.root=file/runs").refused()
    assert "cannot be made" in line and "is a file; set paths.root" in line
    assert "is a file" in fit("env=frozenlake", "paths.run_dir=file").refused()


def test_a_folder_without_rights_is_refused(fit, tmp_path, monkeypatch):
    """Root may write anywhere, so that the system's answer is given here."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    line = fit("env=frozenlake", f"paths.root={tmp_path}").refused()
    assert "may not be written to; set paths.root" in line


def test_a_full_disk_is_refused(fit, monkeypatch):
    full = shutil.disk_usage(".")._replace(free=5 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    assert "5 MB are left on its disk, a run needs 200 MB" in fit("env=frozenlake").refused()


def test_a_disk_that_fills_during_the_run_is_reported(fit, monkeypatch):
    import torch

    def save(*arguments: object) -> None:
        raise OSError(28, os.strerror(28), "warm_start.partial")

    monkeypatch.setattr(torch, "save", save)
    line = fit("env=frozenlake", "paths.run_dir=full").refused()
    assert "full/warm_start.pt: No space left on device (" in line
    assert "MB are left on the disk of this folder); make room" in line


def test_an_unexpected_error_ends_with_what_to_do(fit, tmp_path):
    failing = "+callbacks.fail._target_=broken_callbacks.Fails"
    settings = ("env=frozenlake", "paths.run_dir=run", "validation.baselines=null")
    result = fit(*settings, failing, "warm_start=none")
    assert result.code == 1
    assert result.stderr.count("Traceback") == 1 and "HYDRA_FULL_ERROR" not in result.stderr
    *_, line = result.stderr.splitlines()
    assert line.startswith("ragen_pl: KeyError: 'of a callback'; nothing was saved, no checkpoint")
    assert "; resume with: python -m ragen_pl.fit " in line and line.endswith(" ckpt_path=last")


def test_a_run_under_way_is_left_alone(fit, tmp_path, monkeypatch):
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    # as if another process held the lock
    monkeypatch.setattr(fcntl, "lockf", refuse)
    line = fit("env=frozenlake", "paths.run_dir=run").refused()
    assert line.endswith("trains in it; wait for its end, or set another folder")
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.slow
def test_a_store_of_no_known_kind_is_refused(fit):
    line = fit("logger=mlflow", "+logger.uri=ftp://x").refused()
    assert "MLflow at ftp://x refused: " in line and line.endswith("or set logger=none")


@pytest.mark.slow
def test_a_damaged_store_is_refused(fit, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mlflow.db").write_bytes(b"no database at all" * 100)
    line = fit("env=frozenlake", "logger=mlflow").refused()
    assert line.startswith("logger: ") and "not a database" in line


def test_values_are_refused_before_heavy_imports(fit, monkeypatch):
    for name in [module for module in sys.modules if module.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)  # an import would raise
    assert fit("env=custom", "env.target=broken_environments.FourTuple").refused()
    assert fit("trainer.max_epochs=many").refused()


def test_a_traceback_is_shown_on_request(fit):
    with pytest.raises(ConfigError, match="step returned"):  # Hydra lets it through to Python
        fit("env=custom", "env.target=broken_environments.FourTuple", "debug=true")
