"""Token ids of prompts: template text as it is, control-token strings in other text as ordinary text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle

# characters that stand for names of control tokens in rendered text: the last plane for private use
_FIRST_PLACE, _LAST_PLACE = 0x100000, 0x10FFFD
_PLACES = re.compile(f"[{chr(_FIRST_PLACE)}-{chr(_LAST_PLACE)}]")
# characters of a text that is kept with its ids
_LONGEST_KEPT = 10_000
# tokens that a beginning may have beyond twice the limit
_SLACK = 8
# characters that a tokenizer may drop or join before it makes tokens
_MARGIN = 4
# an added token that a chat template uses as a mark, such as <tool_call>
_MARK = re.compile(r"</?[^\s<>]+>|\[/?[A-Z_]+\]")


# characters of a token: a response has thousands of tokens
_LONGEST_TOKEN = 4096
# text of an incomplete character
_UNKNOWN = "\ufffd"
# largest number of tokens that are decoded together to complete a character
_MOST_OPEN = 64


class TextEncoder:
    """Encode texts of prompts. Short texts that were encoded are kept.

    Args:
        bundle: Tokenizer of the model.
        max_tokens: Length of the context.
        bos_token_id: Id that precedes a prompt; None for none.

    Attributes:
        end: Text of the token that ends a response.
        max_characters: Characters that fill the context by themselves, whatever they are.

    Raises:
        ValueError: The tokenizer does not read that text as one token, the model can't write it, or a token is far
            longer than any that a text needs.
    """

    def __init__(self, bundle: ModelBundle, max_tokens: int, *, bos_token_id: int | None) -> None:
        self._bundle, self._bos_token_id = bundle, bos_token_id
        longest = max(map(len, bundle.tokenizer.get_vocab()))
        if longest > _LONGEST_TOKEN:
            raise ValueError(
                f"the tokenizer has a token of {longest} characters, expected at most {_LONGEST_TOKEN}"
            )
        self.max_characters = _MARGIN * max_tokens * longest
        self._ends = frozenset(bundle.eos_token_ids)
        self._encoded: dict[tuple[str, str], np.ndarray] = {}
        self._encoded_parts: dict[tuple[object, ...], np.ndarray] = {}
        self._splits: dict[str, tuple[str, str]] = {}
        added = list(bundle.tokenizer.added_tokens_decoder.values())
        control = set(bundle.special_tokens.values())
        self._read_ids, self._slot = bundle.embedding_count, bundle.image_token_id
        # text of others may hold their names
        unread = {
            str(token)
            for id, token in bundle.tokenizer.added_tokens_decoder.items()
            if not self._reads(id)
        }
        takes_blanks = {str(token) for token in added if token.lstrip or token.rstrip}
        self._special_names = control
        self._control_tokens = any_of(control | unread)
        self._marks = any_of(
            control | unread | {str(token) for token in added if _MARK.fullmatch(str(token))}
        )
        self._borders = any_of(control - takes_blanks)
        # the name behind each such character, and the character of each name
        self._names: list[str] = []
        self._places: dict[str, str] = {}
        self.end = str(bundle.tokenizer.decode([bundle.end_of_turn_id]))
        if bundle.end_of_turn_id >= bundle.logit_count:
            raise ValueError(
                f"the model can't write {self.end!r}, which ends a response: its id {bundle.end_of_turn_id} is none of "
                f"its {bundle.logit_count} outputs; set the tokenizer's eos_token to the token that ends a response "
                "and save it"
            )
        if self._cached(("start", self.end), self.end).tolist() != [bundle.end_of_turn_id]:
            raise ValueError(
                f"the tokenizer does not read {self.end!r}, which ends a response, as one token; set its eos_token "
                "to the token that ends a response and save it"
            )

    def bounded(self, text: str) -> str:
        """Return a text, or a part of it that fills the context by itself: the rest would be encoded for nothing."""
        return text[: self.max_characters]

    def strip_control_tokens(self, text: str) -> str:
        """Return a text without the tokenizer's control tokens."""
        # removing one token may join the halves of another; of thousands in each other a character keeps these apart
        for _ in range(16):
            before, text = text, self._control_tokens.sub("", text)
            if text == before:
                return text
        return self._control_tokens.sub(_UNKNOWN, text)

    def mark_in(self, text: str) -> str | None:
        """Return the first control token or mark of the chat template in a text, None without any."""
        found = self._marks.search(text)
        return found[0] if found else None

    def escape_control_tokens(self, text: str) -> str:
        """Return a text with a character for private use in place of each name of a control token or mark.

        A chat template can show it among its own text, and `encode_rendered` spells the names in letters.
        """
        return self._marks.sub(self._place, _PLACES.sub("\ufffd", text))

    def encode_rendered(self, text: str, *, continues: bool = False) -> np.ndarray:
        """Return the ids of a rendering of escaped texts, int64 `[tokens]`, with control tokens as ordinary text.

        Args:
            text: The rendering.
            continues: Whether another text stands before it.
        """
        ids: list[np.ndarray] = []
        end = 0
        for found in _PLACES.finditer(text):
            if end < found.start():
                piece = text[end : found.start()]
                ids.append(self.encode(piece, continues=continues or bool(ids)))
            ids.append(self._encode_literally(self._name(found)))
            end = found.end()
        if end < len(text) or not ids:
            ids.append(self.encode(text[end:], continues=continues or bool(ids)))
        return np.concatenate(ids)

    def exceeds(self, text: str, limit: int) -> bool:
        """Return whether a rendering is so much longer than a number of tokens that its beginning is too.

        The work depends on the limit, and not on the length of the rendering. Where only the whole has more tokens, the
        answer is False.
        """
        # what follows can change the last tokens of a beginning, but never halve their number
        most = length = 2 * limit + _SLACK
        while length < len(text):
            if len(self.encode_rendered(text[:length])) > most:
                return True
            length *= 4
        return False

    def _place(self, found: re.Match[str]) -> str:
        name = found[0]
        if name not in self._places:
            self._places[name] = chr(_FIRST_PLACE + len(self._names))
            self._names.append(name)
        return self._places[name]

    def _name(self, found: re.Match[str]) -> str:
        number = ord(found[0]) - _FIRST_PLACE
        return self._names[number] if number < len(self._names) else found[0]

    def encode_parts(
        self, parts: Sequence[tuple[str, bool]], *, continues: bool, marks: bool = False
    ) -> np.ndarray:
        """Return the ids of texts one after the other, int64 `[tokens]`.

        Args:
            parts: Texts, each with whether it is the template's own, as the first one is. A control token's name in
                another text is ordinary text.
            continues: Whether another text stands before them.
            marks: Whether the names of the template's other marks, such as `<tool_response>`, are ordinary text too.
        """
        key = (continues, marks, *parts)
        known = self._encoded_parts.get(key)
        if known is None:
            known = self._encode_parts(parts, continues=continues, marks=marks)
            if len(self._encoded_parts) > 5_000:
                self._encoded_parts.clear()
            if sum(len(text) for text, _ in parts) <= _LONGEST_KEPT:
                self._encoded_parts[key] = known
        # ids of a prompt are its own
        return known.copy()

    def _encode_parts(
        self, parts: Sequence[tuple[str, bool]], *, continues: bool, marks: bool
    ) -> np.ndarray:
        names_of = self._marks if marks else self._control_tokens
        # the template's text up to its last control token is the same in many prompts
        (left, _), *rest = parts
        fixed, word = self._split(left)
        ids = [self.encode(fixed, continues=continues)] if fixed else []
        for text, is_fixed in rest:
            if is_fixed:
                word += text
                continue
            first, *words = names_of.split(text)
            word += first
            for name, following in zip(names_of.findall(text), words, strict=True):
                ids += [
                    self.encode(word, continues=continues or bool(ids)),
                    self._encode_literally(name),
                ]
                word = following
        ids.append(self.encode(word, continues=continues or bool(ids)))
        return np.concatenate(ids)

    def own_text(
        self, parts: Sequence[tuple[str, bool]], *, continues: bool, marks: bool = False
    ) -> np.ndarray:
        """Return which ids of `encode_parts` are of texts other than the template's, bool `[tokens]`.

        A token that reaches over a border belongs to such a text.
        """
        settings = {"continues": continues, "marks": marks}
        ids = self.encode_parts(parts, **settings)
        own = np.zeros(len(ids), dtype=bool)
        for number, (text, is_fixed) in enumerate(parts):
            if is_fixed or not text:
                continue
            start = common_length(self.encode_parts(parts[:number], **settings), ids)
            after = parts[number + 1 :]
            rest = self.encode_parts(after, continues=True, marks=marks) if after else ids[:0]
            own[start : len(ids) - common_length(rest[::-1], ids[::-1])] = True
        return own

    def pieces(self, ids: np.ndarray) -> list[str]:
        """Return the text of each token of a response, see `Context.pieces`; ends have none."""
        kept = [token for token in ids.tolist() if token not in self._ends]
        pieces: list[str] = []
        # tokens up to the end of a character, and how much of their text the pieces have
        open_tokens: list[int] = []
        text, shown = "", 0
        for token in kept:
            open_tokens.append(token)
            is_first = len(open_tokens) == 1
            text = self._bundle.piece(token) if is_first else self._bundle.decode(open_tokens)
            is_whole = not text.endswith(_UNKNOWN) or len(open_tokens) == _MOST_OPEN
            length = max(shown, len(text if is_whole else text.rstrip(_UNKNOWN)))
            pieces.append(text[shown:length])
            shown = length
            if is_whole:
                open_tokens, shown = [], 0
        if open_tokens:
            pieces[-1] += text[shown:]
        return pieces + [""] * (len(ids) - len(kept))

    def _split(self, text: str) -> tuple[str, str]:
        """Split a text after its last control token, over which no other token reaches."""
        if text not in self._splits:
            if len(self._splits) > 1000:
                self._splits.clear()
            ends = [match.end() for match in self._borders.finditer(text)]
            end = ends[-1] if ends else 0
            self._splits[text] = (text[:end], text[end:])
        return self._splits[text]

    def encode(self, text: str, *, continues: bool = False) -> np.ndarray:
        """Return the ids of a text; where it `continues` another, tokenizers add no blank at its start."""
        if continues:
            return self._cached(("continues", text), self.end + text)[1:]
        ids = self._cached(("start", text), text)
        bos = self._bos_token_id
        return ids if bos is None else np.append([bos], ids)

    def _encode_literally(self, name: str) -> np.ndarray:
        """Return the ids of a control token's name in letters."""
        if name not in self._special_names:
            # a name that is no control token to the tokenizer is a token only as a whole
            halves = (self.encode(half, continues=True) for half in (name[:1], name[1:]))
            return np.concatenate([*halves])
        before = self._cached(("spelled", ""), "\n", split_special_tokens=True)
        ids = self._cached(("spelled", name), "\n" + name, split_special_tokens=True)
        return ids[len(before) :]

    def _cached(
        self, key: tuple[str, str], text: str, *, split_special_tokens: bool = False
    ) -> np.ndarray:
        known = self._encoded.get(key)
        if known is not None:
            return known
        if len(self._encoded) > 20_000:
            self._encoded.clear()
        encoded = self._bundle.tokenizer(
            text, add_special_tokens=False, split_special_tokens=split_special_tokens
        )["input_ids"]
        ids = np.asarray(encoded, dtype=np.int64)
        if ids.max(initial=-1) >= self._read_ids:
            self._refuse_unread(ids)
        if len(text) <= _LONGEST_KEPT:
            self._encoded[key] = ids
        return ids

    def _reads(self, token: int) -> bool:
        """Return whether the model has an embedding of an id, or features in its place."""
        return token < self._read_ids or token == self._slot

    def _refuse_unread(self, ids: np.ndarray) -> None:
        for token in ids.tolist():
            if not self._reads(token):
                name = self._bundle.tokenizer.convert_ids_to_tokens(token)
                raise ValueError(
                    f"the tokenizer has the token {name!r} with id {token}, and the model has {self._read_ids} "
                    "embeddings; resize the model's embeddings to the tokenizer and save both, or give the model's own "
                    "tokenizer"
                )


def any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds any of these names, longer ones first."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def common_length(first: np.ndarray, second: np.ndarray) -> int:
    """Return how many ids at the start of two sequences are the same."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length
