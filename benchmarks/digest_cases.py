"""Training runs whose digests are recorded: every preset, environment and experiment, and what these leave off."""

from __future__ import annotations

from ragen_pl.config import config_dir

TINY_TEXT = (
    "model.build.text.hidden_size=64", "model.build.text.intermediate_size=128",
    "model.build.text.num_attention_heads=2",
)  # fmt: skip
TINY_VISION = ("model.build.vision.width=48", "model.build.vision.heads=2")
SMALL = (
    "trainer.max_epochs=3", "trainer.check_val_every_n_epoch=2", "update.epochs=2", "update.minibatches=2",
    "validation.episodes=16", "warm_start.episodes=64", "warm_start.steps=60", "warm_start.batch_size=8",
    "warm_start.optimizer.lr=1e-2", "optimizer.lr=2e-3", "callbacks.progress=null", "callbacks.plots=null",
    "callbacks.trajectories=null", "callbacks.checkpoint=null", "callbacks.best=null",
)  # fmt: skip
SINGLES = ("rollout.groups=16",)
GROUPS = ("rollout.groups=4", "rollout.group_size=4")
SHORT = ("env.max_turns=4", "env.invalid_ends=false", "env.kwargs.min_distance=1")

ALGORITHMS, MODULES = "ragen_pl.algorithms", "ragen_pl.modules"
LOSS_MASK = f"algorithm.masks.loss._target_={ALGORITHMS}.masks"
CREDIT_MASK = f"algorithm.masks.advantage._target_={ALGORITHMS}.masks"
KL_MASK = f"algorithm.loss.kl.mask._target_={ALGORITHMS}.masks"
LOSS = f"algorithm.loss.policy._target_={ALGORITHMS}.ratio_losses"
BY = f"algorithm.normalize.by._target_={ALGORITHMS}.normalization"
KEEP = f"algorithm.filter.keep._target_={ALGORITHMS}.group_filter"
MISMATCH = f"+algorithm.loss.mismatch._target_={ALGORITHMS}.mismatch"
REFERENCE = f"algorithm.loss.kl.reference._target_={MODULES}.reference"
ADAPTIVE = "{_target_:ragen_pl.rollout.temperature.AdaptiveTemperature,beta:0.5}"
DROPOUT = "+model.build.text.attention_dropout=0.1"
TEXT, IMAGES = ("env=frozenlake", *SHORT), ("env=frozenlake_visual", *SHORT)
# Placeholder for the folder of a small language model.
SAVED_MODEL = "SAVED_MODEL"

# Settings that no preset uses. Independent settings share a case.
EXTRAS: dict[str, tuple[str, ...]] = {
    # critics, layouts, the update phase
    "own_critic": (
        *IMAGES,
        "algorithm=turn_ppo",
        "algorithm.critic=own",
        "critic.lr=1e-3",
        "algorithm.loss.value_clip=0.1",
        "context.window=3",
        "env.turn_limit_bootstraps=true",
        DROPOUT,
    ),
    "window_all": (
        *IMAGES,
        "algorithm=trico",
        "context.window=all",
        "context.system_prompt=instructions",
        "update.length_buckets=2",
        "context.max_tokens=330",
    ),
    "window_3": (
        *TEXT,
        "algorithm=grpo",
        *GROUPS,
        "context.window=3",
        "rollout.num_envs=6",
        "context.turn_template='{observation} now'",
    ),
    "truncated_sampling": (
        *TEXT,
        "algorithm=grpo",
        *GROUPS,
        "algorithm.loss.kl.estimator=k3",
        "rollout.top_p=0.95",
        "rollout.top_k=50",
        "rollout.min_p=0.01",
    ),
    "accumulated_gradients": (
        *IMAGES,
        "algorithm=starpo",
        "trainer.accumulate_grad_batches=2",
        "trainer.gradient_clip_val=0.1",
        DROPOUT,
    ),
    "no_warm_start": (
        *TEXT,
        "algorithm=starpo",
        "warm_start=none",
        f"{LOSS_MASK}.no_special",
        "algorithm.rewards.overlong.penalty=0.5",
    ),
    "adapters": (
        *TEXT,
        "algorithm=grpo",
        *GROUPS,
        "model=pretrained",
        f"model.build.path={SAVED_MODEL}",
        "model.build.lora={r:4,lora_alpha:8}",
        f"{REFERENCE}.AdaptersOff",
        "algorithm.rewards.overlong.penalty=0.5",
    ),
    # contexts, prompt formats, environments
    "left_out": (
        *IMAGES,
        "algorithm=trico",
        "context.window=3",
        "context.leave_out.patches=0.25",
        "context.leave_out.turns=0.5",
    ),
    "grounding": (
        "env=sokoban_visual",
        "env.max_turns=4",
        "env.invalid_ends=false",
        "algorithm=starpo",
        "env.prompt_format=grounding",
        "algorithm.rewards.world_model.grounding_weight=0.2",
        "rollout.max_response_tokens=48",
    ),
    "worldmodeling": (
        *TEXT,
        "algorithm=grpo",
        *GROUPS,
        "env.prompt_format=worldmodeling",
        "algorithm.rewards.world_model.worldmodeling_weight=0.2",
        "algorithm.rewards.world_model.judge.floor=0.5",
        "rollout.max_response_tokens=48",
    ),
    "no_think": (
        *TEXT,
        "algorithm=trico",
        "env.prompt_format=no_think",
        f"{BY}.ByBatch",
        "+algorithm.normalize.by.scale_by_std=false",
    ),
    "several_actions": (
        *IMAGES,
        "algorithm=gigpo",
        *GROUPS,
        "env.max_actions_per_turn=3",
        "rollout.max_response_tokens=40",
    ),
    "own_images": (
        "env=custom",
        "env.target=my_environments.BrightSide",
        "env.visual=true",
        "model=small_vlm",
    ),
    # rewards and groups
    "curriculum_and_shaping": (
        *IMAGES,
        "algorithm=starpo",
        "curriculum.above=0.0",
        "curriculum.window=1",
        "algorithm.rewards.placement.place=end",
        "algorithm.rewards.weights.turn=0.5",
        "algorithm.rewards.weights.final=2.0",
        "algorithm.rewards.weights.format=3.0",
        "algorithm.rewards.think_length.amount=0.5",
        "algorithm.rewards.think_length.low=1",
        "algorithm.rewards.think_length.high=8",
        "algorithm.rewards.action_efficiency.penalty=0.1",
        "algorithm.rewards.overlong.penalty=0.2",
        "rollout.max_response_tokens=14",
    ),
    "normalized_by_group": (
        *TEXT,
        "algorithm=starpo",
        *GROUPS,
        f"{BY}.ByGroup",
        "algorithm.normalize.clip_low=-1.0",
        "algorithm.normalize.clip_high=1.0",
        "algorithm.loss.whiten=false",
    ),
    "normalized_running": (
        *TEXT,
        "algorithm=starpo",
        *GROUPS,
        f"{BY}.Running",
        "+algorithm.normalize.by.decay=0.5",
        f"{KEEP}.TopMass",
        "+algorithm.filter.keep.fraction=0.6",
        "algorithm.filter.rescale=sqrt",
    ),
    "normalized_by_schedule": (
        *TEXT,
        "algorithm=starpo",
        *GROUPS,
        f"{BY}.Schedule",
        "+algorithm.normalize.by.starts=[0,1,2]",
        f"{KEEP}.TopCount",
        "+algorithm.filter.keep.count=2",
        "algorithm.filter.rescale=linear",
        "algorithm.filter.reweight=1.0",
    ),
    # masks and temperatures
    "mask_of_high_entropy": (
        *TEXT,
        "algorithm=starpo",
        "algorithm.masks.top_entropy=0.2",
        f"{CREDIT_MASK}.action_span",
        "algorithm.masks.overlong_responses=mask",
        "rollout.max_response_tokens=14",
        f"rollout.adaptive_temperature={ADAPTIVE}",
        "rollout.temperature=0.9",
    ),
    "mask_by_importance": (
        *IMAGES,
        "algorithm=trico_importance",
        "algorithm.masks.importance.advantage=0.5",
        "context.window=2",
        f"{LOSS_MASK}.think_span",
    ),
    # losses
    "sequence_ratio": (
        *TEXT,
        "algorithm=grpo",
        *GROUPS,
        f"{LOSS}.SequencePolicyLoss",
        "algorithm.loss.policy.clip_low=0.01",
        "algorithm.loss.policy.clip_high=0.02",
        "algorithm.loss.kl.estimator=k2",
    ),
    "clipped_weights": (
        *TEXT,
        "algorithm=grpo",
        *GROUPS,
        f"{LOSS}.ClippedWeightLoss",
        "algorithm.loss.kl.estimator=k1",
        "algorithm.loss.kl.aggregation=token-mean",
        f"{KL_MASK}.until_action",
    ),
    "dual_clip_and_entropy": (
        *TEXT,
        "algorithm=starpo",
        "algorithm.loss.policy.dual_clip=1.05",
        "algorithm.loss.policy.clip_low=0.05",
        "algorithm.loss.entropy_coefficient=0.05",
        "algorithm.loss.entropy_target=2.0",
        "algorithm.loss.value_coefficient=0.5",
        "algorithm.loss.policy.aggregation=constant",
        "algorithm.loss.policy.constant=20",
    ),
    "moving_reference": (
        *TEXT,
        "algorithm=starpo",
        f"{REFERENCE}.MovingAverage",
        "+algorithm.loss.kl.reference.decay=0.5",
        "algorithm.loss.kl.estimator=k3",
        "algorithm.loss.kl.coefficient=0.2",
    ),
    "kl_in_reward": (
        *TEXT,
        "algorithm=trico",
        "algorithm.loss.kl.place=reward",
        "algorithm.loss.kl.estimator=k1",
        "algorithm.loss.kl.coefficient=0.1",
        f"{LOSS_MASK}.think_weighted",
        "+algorithm.masks.loss.think=0.25",
        f"{CREDIT_MASK}.no_special",
    ),
    "k2_in_loss": (
        *TEXT,
        "algorithm=rloo",
        *GROUPS,
        "algorithm.loss.kl.place=loss",
        "algorithm.loss.kl.estimator=k2",
        f"{REFERENCE}.MovingAverage",
    ),
    "mismatch_of_tokens": (
        *IMAGES,
        "algorithm=starpo",
        f"{MISMATCH}.TruncatedWeights",
        "+algorithm.loss.mismatch.cap=1.0",
        "rollout.temperature=0.7",
        "trainer.precision=bf16-mixed",
    ),
    "mismatch_of_responses": (
        *TEXT,
        "algorithm=grpo",
        *GROUPS,
        f"{MISMATCH}.MaskedWeights",
        "+algorithm.loss.mismatch.level=sequence",
        "+algorithm.loss.mismatch.low=0.99",
        "+algorithm.loss.mismatch.high=1.01",
        "trainer.precision=bf16-mixed",
    ),
    # callbacks
    "all_callbacks": (
        "env=frozenlake_visual",
        "callbacks.checkpoint.every_n_epochs=1",
        "callbacks.trajectories.every_n_iterations=1",
        "callbacks.diagnostics.probe_every_n_iterations=1",
        "callbacks.diagnostics.first=1",
        "callbacks.plots.every_n_iterations=2",
        "callbacks.collapse.actions=[mitigate]",
        "callbacks.collapse.grace=1",
        "callbacks.collapse.alarms.format.below=1.0",
        "callbacks.collapse.alarms.format.patience=1",
        "callbacks.collapse.mitigation.kl_coefficient=0.5",
        "callbacks.collapse.mitigation.learning_rate_factor=0.5",
        "callbacks.collapse.mitigation.entropy_target=2.0",
    ),
}
# This case keeps the callbacks that SMALL disables.
WITH_ALL_CALLBACKS = "extra/all_callbacks"

# environments that need a server or a library of `make test-environments`, and algorithms that need a teacher
NEEDS_MORE = (
    "opd",
    *("arithmetic", "countdown", "mini_sudoku", "reasoning_gym", "word_problem"),
    *(
        "metaworld",
        "miniwob",
        "miniworld",
        "openenv",
        "textarena",
        "textarena_two_player",
        "textworld",
    ),
)

NEEDS_A_VALUE = {
    "custom": ("env.target=my_environments.GuessTheNumber",),
    "mixture": ("env.environments={bandit: 1, frozenlake: 1}",),
    "opsd": ("env.kwargs.plans=true",),
}


def cases() -> dict[str, tuple[str, ...]]:
    """Return the overrides of every case by its name."""
    presets: dict[str, tuple[str, ...]] = {}
    for name in _options("algorithm"):
        if name in NEEDS_MORE:
            continue
        presets[f"algorithm/{name}"] = (f"algorithm={name}", *IMAGES, *NEEDS_A_VALUE.get(name, ()))
    for name in _options("env"):
        if name in NEEDS_MORE:
            continue
        presets[f"env/{name}"] = (f"env={name}", *NEEDS_A_VALUE.get(name, ()))
    for name in _options("experiment"):
        presets[f"experiment/{name}"] = (f"experiment={name}", *IMAGES)
    return presets | {f"extra/{name}": overrides for name, overrides in EXTRAS.items()}


def _options(group: str) -> list[str]:
    return sorted(file.stem for file in (config_dir() / group).glob("*.yaml"))
