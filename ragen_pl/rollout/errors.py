"""The error of episodes that cannot be played as they are set up."""


class RolloutError(RuntimeError, ValueError):
    """No episode can be played: every reset or turn failed, or a first prompt has no room.

    It is a ValueError too, for as a rule a setting or the environment is to blame, and not the program.
    """
