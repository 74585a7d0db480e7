"""`python -m ragen_pl.serve_environment env=NAME`: let other machines play an environment over the network."""

from __future__ import annotations

from omegaconf import DictConfig

from ragen_pl.config import hydra_main


@hydra_main("serve_environment")
def main(cfg: DictConfig) -> None:
    """Answer until SIGTERM or Ctrl-C."""
    from ragen_pl.environments.hosting import serve

    serve(cfg)


if __name__ == "__main__":
    main()
