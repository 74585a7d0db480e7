"""`python -m ragen_pl.submit env=frozenlake_visual paths.run_dir=SHARED/run`: train in a SLURM job."""

from ragen_pl.slurm.submit import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
