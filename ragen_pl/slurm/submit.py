"""`python -m ragen_pl.submit env=frozenlake_visual paths.run_dir=SHARED/run`: train in a SLURM job.

Takes the overrides of `python -m ragen_pl.fit`, and `slurm.KEY=VALUE` (`ragen_pl.slurm.job_file.SlurmSettings`). The
job's file and the resolved config are written into the run's folder, and the job is submitted. `dry_run=true` only
prints the file.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from ragen_pl.base.constraints import path_override
from ragen_pl.checkpoints.folder import time_stamped
from ragen_pl.config import ConfigError, check_config, check_packages
from ragen_pl.config.composition import compose_overrides
from ragen_pl.config.docstrings import description_of
from ragen_pl.config.ending import or_exit
from ragen_pl.config.errors import config_errors
from ragen_pl.config.main import options_first, parsed
from ragen_pl.config.nodes import plain
from ragen_pl.config.own_files import write_settings
from ragen_pl.slurm.job_file import SlurmSettings, job_file

JOB_FILE = "job.sbatch"
_OWN = ("dry_run", "slurm.")


def main() -> None:
    """Submit the job of the command line. A wrong setting ends the process with one line and code 2."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(usage())
        return
    or_exit(lambda: submit(sys.argv[1:]))


def usage() -> str:
    """Return the text of `--help`."""
    settings = f"{SlurmSettings.__module__}.{SlurmSettings.__qualname__}"
    keys = {
        f"slurm.{name}": description_of(name, [settings])
        for name in SlurmSettings.__dataclass_fields__
    }
    keys["dry_run"] = "true: print the job's file and submit nothing."
    lines = [f"{key:<22}{text}" for key, text in keys.items()]
    return "\n".join(
        [
            "python -m ragen_pl.submit [GROUP=OPTION …] [KEY=VALUE …]",
            "",
            "Train in a SLURM job: python -m ragen_pl.submit env=frozenlake_visual paths.run_dir=SHARED/run",
            "",
            "Keys of the job (KEY=VALUE):",
            "",
            *lines,
            "",
            "Groups and keys of the run: python -m ragen_pl.fit --help",
        ]
    )


def submit(arguments: Sequence[str]) -> Path:
    """Write the files of a job into its run's folder and submit it, unless `dry_run=true` prints it only.

    Args:
        arguments: Of the command line.

    Returns:
        The run's folder.

    Raises:
        ConfigError: A setting is wrong, or this machine has no sbatch.
    """
    args = parsed(options_first(arguments), config_name="fit")
    if args.cfg or args.info or args.multirun:
        raise ConfigError(
            "a job is one run: python -m ragen_pl.fit shows its configuration (--cfg job), and dry_run=true the job's "
            "file; submit the runs of a sweep one by one"
        )
    own = [word for word in args.overrides if word.startswith(_OWN)]
    overrides = [word for word in args.overrides if word not in own]
    dry_run, settings = _own_settings(own)
    cfg = _composed(overrides, directory=args.config_dir)
    folder = _folder(cfg)
    if cfg.ckpt_path is None:
        overrides.append("ckpt_path=auto")
    elif cfg.ckpt_path != "auto":
        raise ConfigError(
            f"ckpt_path={cfg.ckpt_path}: a job that is requeued continues its own run; set ckpt_path=auto and "
            "paths.run_dir to the run's folder"
        )
    overrides = [word for word in overrides if not word.startswith("paths.run_dir=")]
    overrides.append(path_override("paths.run_dir", folder))
    cfg.ckpt_path, cfg.paths.run_dir = "auto", str(folder)
    directory = [f"--config-dir={Path(args.config_dir).resolve()}"] if args.config_dir else []
    text = job_file(cfg, settings, folder=folder, arguments=[*directory, *overrides])
    if dry_run:
        print(text, end="")
        return folder
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise ConfigError(
            "sbatch is not on this machine's PATH; submit on a login node of the cluster, or set dry_run=true"
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / JOB_FILE).write_text(text)
    if not (folder / "config.yaml").exists():
        write_settings(folder / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
    print(f"run {folder}", flush=True)
    done = subprocess.run(
        [sbatch, str(folder / JOB_FILE)], stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise ConfigError(f"{folder / JOB_FILE}: {done.stderr.strip()}")
    return folder


def _own_settings(words: Sequence[str]) -> tuple[bool, SlurmSettings]:
    """Return whether to print only, and the settings of the job."""
    with config_errors("slurm", hint="give KEY=VALUE, such as slurm.time=24:00:00"):
        given = OmegaConf.from_dotlist(list(words))
        unknown = sorted(set(given) - {"dry_run", "slurm"})
        dry_run = given.get("dry_run", False)
        if unknown or not isinstance(dry_run, bool):
            raise ValueError(f"dry_run={dry_run}: expected true or false")
        chosen = plain(given.get("slurm"))
        known = SlurmSettings.__dataclass_fields__
        if wrong := [name for name in chosen if name not in known]:
            raise ConfigError(f"unknown key slurm.{wrong[0]}: expected {', '.join(known)}")
        # 24:00:00 is a number of seconds in YAML
        times = [word.partition("=")[2] for word in words if word.startswith("slurm.time=")]
        if times:
            chosen["time"] = times[-1]
        return dry_run, SlurmSettings(**chosen)


def _composed(overrides: list[str], *, directory: str | None) -> DictConfig:
    """Compose and check the config of the run."""
    check_packages()
    cfg = compose_overrides("fit", overrides, directory=directory)
    check_config(cfg)
    return cfg


def _folder(cfg: DictConfig) -> Path:
    if cfg.paths.run_dir is not None:
        return Path(cfg.paths.run_dir).expanduser().absolute()
    return time_stamped(Path(cfg.paths.root).expanduser().absolute() / cfg.env.name)
