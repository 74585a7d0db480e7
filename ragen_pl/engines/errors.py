"""Error of episodes that cannot be played."""


class RolloutError(RuntimeError, ValueError):
    """Every reset or turn failed, or a first prompt has no room.

    It is a ValueError as well: a setting or the environment is usually the cause.
    """
