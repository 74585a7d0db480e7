from support.episodes.rollout_fixtures import fresh_lm, fresh_vlm, lm, play, vlm
from support.servers.faulty_servers import serve

__all__ = ["fresh_lm", "fresh_vlm", "lm", "play", "serve", "vlm"]
