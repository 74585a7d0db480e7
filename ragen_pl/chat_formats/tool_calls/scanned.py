"""Text whose markers are searched for from growing positions, in linear time together."""

from __future__ import annotations


class ScannedText:
    """A text, and for each marker the last place at which it was found.

    A marker that is searched for again from before that place is not searched for again: many openings
    without a closing take one search to the end, not one each.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._found: dict[str, tuple[int, int]] = {}

    def find(self, marker: str, start: int) -> int:
        """Return the first position of a marker from `start` on, the length of the text if there is none."""
        searched, place = self._found.get(marker, (0, -1))
        if searched <= start <= place:
            return place
        place = self.text.find(marker, start)
        if place < 0:
            place = len(self.text)
        self._found[marker] = (start, place)
        return place
