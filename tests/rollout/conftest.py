from support.episodes.rollout_fixtures import fresh_lm, fresh_vlm, lm, play, vlm

__all__ = ["fresh_lm", "fresh_vlm", "lm", "play", "vlm"]
