"""What the Trainer's keyword arguments may be (lightning 2.6); the rest of the table is in `schema`.

Left out are those that the run sets itself: logger, callbacks, num_sanity_val_steps,
enable_model_summary, log_every_n_steps, default_root_dir.
"""

from __future__ import annotations

from ragen_pl.config.rules import Kind, Rule

_BOOL = Rule(kind=Kind.BOOL)
_COUNT = Rule(kind=Kind.INT, minimum=1)
_LIMIT = Rule(kind=Kind.FLOAT, minimum=0, also=(None,), note="a share up to 1.0, or a count")
# The true half precisions would round log-probs, advantages and counts as well; model.build.dtype=bfloat16 does not.
_PRECISIONS = ("32-true", "16-mixed", "bf16-mixed", "32", "16", "bf16")
_STRATEGIES = (
    "auto", "ddp", "ddp_find_unused_parameters_true", "ddp_find_unused_parameters_false", "ddp_spawn",
    "ddp_fork", "fsdp", "fsdp_cpu_offload", "deepspeed", "deepspeed_stage_1", "deepspeed_stage_2",
    "deepspeed_stage_2_offload", "deepspeed_stage_3", "deepspeed_stage_3_offload",
)  # fmt: skip

TRAINER: dict[str, Rule] = {
    "trainer.accelerator": Rule(kind=Kind.TEXT, choices=("auto", "cpu", "gpu", "cuda")),
    "trainer.devices": Rule(
        kind=Kind.INT, minimum=1, also=("auto", -1), note="or a list such as [0,1]"
    ),
    "trainer.devices.*": Rule(kind=Kind.INT, minimum=0),
    "trainer.num_nodes": _COUNT,
    "trainer.strategy": Rule(kind=Kind.TEXT, choices=_STRATEGIES),
    "trainer.precision": Rule(kind=Kind.TEXT, choices=_PRECISIONS, also=(16, 32, None)),
    "trainer.fast_dev_run": Rule(kind=Kind.INT, minimum=0, also=(False, True)),
    "trainer.max_epochs": Rule(kind=Kind.INT, minimum=0, also=(-1,), note="iterations"),
    "trainer.min_epochs": Rule(kind=Kind.INT, minimum=0, also=(None,)),
    "trainer.max_steps": Rule(kind=Kind.INT, minimum=-1),
    "trainer.min_steps": Rule(kind=Kind.INT, minimum=0, also=(None,)),
    "trainer.max_time": Rule(kind=Kind.TEXT, contains=":", also=(None,), note="DD:HH:MM:SS"),
    "trainer.limit_train_batches": _LIMIT,
    "trainer.limit_val_batches": _LIMIT,
    "trainer.limit_test_batches": _LIMIT,
    "trainer.limit_predict_batches": _LIMIT,
    "trainer.overfit_batches": _LIMIT,
    "trainer.val_check_interval": Rule(kind=Kind.FLOAT, above=0, also=(None,)),
    "trainer.check_val_every_n_epoch": Rule(kind=Kind.INT, minimum=1, also=(None,)),
    "trainer.enable_checkpointing": _BOOL,
    "trainer.enable_progress_bar": _BOOL,
    "trainer.accumulate_grad_batches": _COUNT,
    "trainer.gradient_clip_val": Rule(kind=Kind.FLOAT, above=0, also=(None,)),
    "trainer.gradient_clip_algorithm": Rule(
        kind=Kind.TEXT, choices=("norm",), also=(None,), note="each parameter group by its own norm"
    ),
    "trainer.deterministic": Rule(kind=Kind.BOOL, also=("warn", None)),
    "trainer.benchmark": Rule(kind=Kind.BOOL, also=(None,)),
    "trainer.inference_mode": _BOOL,
    "trainer.use_distributed_sampler": _BOOL,
    "trainer.profiler": Rule(
        kind=Kind.TEXT, choices=("simple", "advanced", "pytorch", "xla"), also=(None,)
    ),
    "trainer.detect_anomaly": _BOOL,
    "trainer.barebones": _BOOL,
    "trainer.sync_batchnorm": _BOOL,
}
