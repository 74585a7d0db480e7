from support.episodes.rollout_fixtures import fresh_lm, fresh_vlm, lm, play, vlm
from support.servers.server_engines import connect, start

__all__ = ["connect", "fresh_lm", "fresh_vlm", "lm", "play", "start", "vlm"]
