"""The corpus of the small model's tokenizer: the words of the shipped environments.

The corpus is frozen: another word would change every id, and saved models would become unreadable. Other words are
encoded too, as more tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

# Words that also start an observation, a thought or an answer: with and without a space before them.
_STARTING = (
    "Up", "Down", "Left", "Right", "me", "goal", "box", "first", "last", "turn", "arms", "reach", "push",
    "so",
)  # fmt: skip
_FOLLOWING = (
    "goal", "avoid", "holes", "target", "walls", "the", "boxes", "onto", "targets", "of", "far", "none",
    "second", "paid", "||", "_", "O", "G", "P", "X", "W",
    "#", "B", "S", *"0123456789",
)  # fmt: skip
_COLOURS = ("Red", "Blue", "Green", "Yellow", "White", "Black", "Pink", "Gray")
_NAMES = (
    "Dragon", "Phoenix", "Gambler", "Librarian", "Pirate", "Gardener", "Volcano", "Meadow", "Tiger", "Turtle",
    "Storm", "Harbor", "Rocket", "Bicycle", "Explorer", "Clerk",
)  # fmt: skip
_RULES = (
    "You walk on a frozen lake of 4 rows and 4 columns. Reach the goal without stepping into a hole: a hole "
    "ends the walk. The moves are Up, Down, Left and Right, one cell each; a move against the edge leaves you "
    "where you are. Each turn tells the row and the column of you, of the goal and of the holes.",
    "You are in a walled room. Push the box onto the target. Walking into a box pushes it one cell further if "
    "nothing is behind it; a box cannot be pulled, and neither you nor a box can enter a wall. Each turn shows "
    "a picture of the room from above.",
    "There are two arms and you pull one of them. One arm is safe, the other is risky. Choose the arm that "
    "pays more on average; answer with its name. Each turn tells what your last pull paid: remember it.",
)


def texts() -> Iterator[str]:
    """Yield the corpus. More frequent words merge first: those of responses."""
    for _ in range(1000):
        yield from _STARTING
        yield from (f" {word}" for word in _STARTING + _FOLLOWING)
    for words, times in ((_COLOURS, 200), (_NAMES, 50)):
        for _ in range(times):
            yield from words
            yield from (f" {word}" for word in words)
    yield from _RULES
