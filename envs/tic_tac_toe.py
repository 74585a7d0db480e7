"""Tic-tac-toe, with a player that never loses."""

from __future__ import annotations

from functools import cache

import numpy as np
from gymnasium import spaces

from .base import TEXT_CHARSET, Observation
from .two_player import TwoPlayerGame

_CELLS, _EMPTY = 9, "."
# rows, columns and diagonals
LINES = (
    *((row, row + 1, row + 2) for row in (0, 3, 6)),
    *((column, column + 3, column + 6) for column in (0, 1, 2)),
    (0, 4, 8),
    (2, 4, 6),
)
MARKS = "xo"


class TicTacToe(TwoPlayerGame):
    """Put three marks in a row, column or diagonal before the other player does.

    ## Description
    Two players mark the cells of a 3 x 3 board in turn. x moves first. With perfect play a game is a draw.

    ## Action Space
    `Discrete(9)`: the cells 1 to 9, row by row.

    ## Observation Space
    `Text`: the board with the numbers of its empty cells, and the seat's mark, such as `x 2 3, 4 o 6, 7 8 9 you x`.

    ## Rewards
    1 for three in a line, -1 for the other seat, 0 for both in a draw. The rewards of the two seats sum to 0.

    ## Episode End
    Terminated by three in a line or a full board.

    ## Information
    `success`: a win of the seat that moved. `action_is_effective`, `action_is_valid`: the cell was empty. With two
    seats, `seat_rewards` and `seat_success` of each.

    ## Arguments
    `opponent` in training and `validation_opponent` in validation: `random`, or `optimal`, who draws uniformly among
    the moves of the best value (minimax); None for two seats. The option `seat` of a reset is the player's beside an
    opponent.

    ## Version History
    - v0: first version.
    """

    needs_trust = ()

    action_names = tuple(map(str, range(1, _CELLS + 1)))
    seat_names = ("x", "o")
    frequent_words = ("you", "x", "o", "win", "block", "none", *action_names)
    instructions = (
        "You play tic-tac-toe on a board of 3 rows with 3 cells. You see your mark, the marks x and o, and the numbers "
        "of the empty cells. Answer with the number of an empty cell to mark it. Who first has three marks in a row, a "
        "column or a diagonal wins."
    )

    def __init__(
        self,
        *,
        opponent: str | None = None,
        validation_opponent: str | None = "optimal",
        render_mode: str | None = None,
    ) -> None:
        super().__init__(
            opponent=opponent, validation_opponent=validation_opponent, render_mode=render_mode
        )
        self.action_space = spaces.Discrete(_CELLS)
        self.observation_space = spaces.Text(max_length=40, charset=TEXT_CHARSET)
        self.board = _EMPTY * _CELLS

    def observe(self, seat: int) -> Observation:
        """Return the board and the seat's mark."""
        cells = [
            str(number + 1) if mark == _EMPTY else mark for number, mark in enumerate(self.board)
        ]
        rows = [" ".join(cells[start : start + 3]) for start in (0, 3, 6)]
        return f"{', '.join(rows)} you {MARKS[seat]}"

    def legal_actions(self) -> list[int]:
        """Return the empty cells."""
        return [cell for cell in range(_CELLS) if self.board[cell] == _EMPTY]

    def describe(self) -> str:
        """Return the cells where the seat to move completes a line, and where the other seat would.

        Such as `win none block 3 7`.
        """
        own, other = MARKS[self.mover], MARKS[1 - self.mover]
        return f"win {self._completing(own)} block {self._completing(other)}"

    def _completing(self, mark: str) -> str:
        cells = [cell for cell in self.legal_actions() if winner(marked(self.board, cell, mark))]
        return " ".join(self.action_names[cell] for cell in cells) or "none"

    def difficulty(self) -> int:
        """Return the number of empty cells."""
        return len(self.legal_actions())

    def optimal_action(self, rng: np.random.Generator) -> int:
        """Return a move of the highest minimax value, drawn uniformly among the equal ones."""
        return int(rng.choice(optimal_moves(self.board)))

    def _deal(self) -> None:
        self.board, self.mover = _EMPTY * _CELLS, 0

    def _move(self, action: int) -> None:
        self.board = marked(self.board, action, MARKS[self.mover])
        value = winner(self.board)
        if value or _EMPTY not in self.board:
            self.rewards = (float(value), float(-value))
        else:
            self.mover = 1 - self.mover


def marked(board: str, cell: int, mark: str) -> str:
    """Return a board with one more mark."""
    return f"{board[:cell]}{mark}{board[cell + 1 :]}"


def winner(board: str) -> int:
    """Return 1 if x has three in a line, -1 if o has, 0 otherwise.

    >>> [winner("xxxoo...."), winner("oo.oxxox."), winner("x........")]
    [1, 0, 0]
    """
    for a, b, c in LINES:
        if board[a] != _EMPTY and board[a] == board[b] == board[c]:
            return 1 if board[a] == MARKS[0] else -1
    return 0


@cache
def value(board: str) -> int:
    """Return the value of a position for x under perfect play: 1, 0 or -1 (minimax over the whole game)."""
    if (won := winner(board)) or _EMPTY not in board:
        return won
    values = [value(after) for _, after in _moves(board)]
    return max(values) if _mover(board) == 0 else min(values)


@cache
def optimal_moves(board: str) -> tuple[int, ...]:
    """Return the moves that keep the value of a position."""
    best = value(board)
    return tuple(cell for cell, after in _moves(board) if value(after) == best)


def _mover(board: str) -> int:
    return board.count(MARKS[0]) - board.count(MARKS[1])


def _moves(board: str) -> list[tuple[int, str]]:
    mark = MARKS[_mover(board)]
    return [(cell, marked(board, cell, mark)) for cell in range(_CELLS) if board[cell] == _EMPTY]
