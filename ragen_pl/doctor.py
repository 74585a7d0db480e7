"""`python -m ragen_pl.doctor`: report on the machine and the installation, or plan the memory of a run."""

from ragen_pl.installation.doctor import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
