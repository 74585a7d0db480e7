"""`python -m ragen_pl.new_environment NAME`: write the files of an environment of your own."""

from ragen_pl.environments.template import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
