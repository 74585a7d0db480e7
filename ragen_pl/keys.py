"""Print the keys of a training configuration as Markdown: python -m ragen_pl.keys > docs/keys.md."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ragen_pl.config.composition import compose_overrides
from ragen_pl.config.ending import or_exit
from ragen_pl.config.keys import page_of


def page(overrides: Sequence[str] = ()) -> str:
    """Return the page of a configuration.

    Args:
        overrides: As `ragen_pl.fit` takes them, such as `env=bandit`.

    Raises:
        ConfigError: They cannot be composed.
    """
    cfg = compose_overrides("fit", list(overrides))
    return page_of(cfg, command=" ".join(["python -m ragen_pl.fit", *overrides]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the page of the configuration of the command line."""
    parser = argparse.ArgumentParser(prog="python -m ragen_pl.keys", description=__doc__)
    parser.add_argument("overrides", nargs="*", help="of the configuration, such as env=bandit")
    given = parser.parse_args(arguments).overrides
    print(or_exit(lambda: page(given)), end="")


if __name__ == "__main__":
    main()
