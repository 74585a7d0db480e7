"""Pages of MiniWoB as numbered elements, and scripts that act on them in the browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...envs.tools import ToolError

# The library numbers elements in its own way, by `ref`. It leaves out those without a size, as images are until they
# are loaded, also those named in style sheets.
READ = """
const answer = arguments[arguments.length - 1];
const rows = [];
function add(node, text) {
  const element = core.previousDOMInfo[node.ref];
  const select = element instanceof HTMLSelectElement;
  rows.push({
    ref: node.ref, tag: node.tag.toLowerCase(), text: text || '',
    value: select ? (element.selectedOptions[0] || {text: ''}).text : node.value,
    name: String(typeof node.classes == 'string' && node.classes || node.id || ''),
    options: select ? Array.from(element.options, option => option.text) : null,
  });
}
function walk(node) {
  if (node.children.length && node.children.every(child => child.tag == 't'))
    add(node, node.children.map(child => child.text).join(' '));
  else if (node.children.length) node.children.forEach(walk);
  else add(node, node.text);
}
function read() {
  walk(core.getDOMInfo());
  const said = core.getUtterance();
  answer({
    rows: rows, done: WOB_DONE_GLOBAL, reward: WOB_RAW_REWARD_GLOBAL,
    utterance: typeof said == 'string' ? said : said.utterance,
  });
}
const styled = Array.from(document.querySelectorAll('*'), element => getComputedStyle(element).content)
  .map(content => content.match(/^url\\("(.*)"\\)$/)).filter(Boolean)
  .map(match => { const image = new Image(); image.src = match[1]; return image; });
const images = Array.from(document.images).concat(styled);
Promise.all(images.map(image => image.decode().catch(() => null)))
  .then(() => requestAnimationFrame(() => requestAnimationFrame(read)));
"""

CLICK = "return core.elementClick(arguments[0]);"

TYPE = """
const element = core.previousDOMInfo[arguments[0]];
element.focus();
element.value = arguments[1];
for (const name of ['keydown', 'input', 'keyup', 'change'])
  element.dispatchEvent(new Event(name, {bubbles: true}));
return element.value == arguments[1];
"""

SELECT = """
const element = core.previousDOMInfo[arguments[0]];
element.selectedIndex = arguments[1];
element.dispatchEvent(new Event('change', {bubbles: true}));
"""

_TYPED = frozenset(
    f"input_{kind}" for kind in ("text", "password", "date", "number", "search", "email", "tel")
)
_MAX_OPTIONS = 40


@dataclass(frozen=True, kw_only=True)
class Element:
    """An element without elements inside.

    Attributes:
        number: Place on the page, from 1; 0 for text that cannot be clicked.
        ref: The library's number.
        tag: Tag, with the kind of an input.
        text: Text inside.
        value: Text of a field, state of a box, or chosen option.
        name: Classes or id.
        options: Texts of a list's options.
    """

    number: int
    ref: int
    tag: str
    text: str
    value: str | bool | None
    name: str
    options: tuple[str, ...]

    @property
    def takes_text(self) -> bool:
        """Whether it is a field for text."""
        return self.tag == "textarea" or self.tag in _TYPED

    @property
    def kind(self) -> str:
        """Tag, or kind of an input."""
        return self.tag.removeprefix("input_")

    def line(self) -> str:
        """Return the element as a line of the observation."""
        words = [str(self.number) if self.number else "-", self.kind]
        if self.text:
            words.append(f'"{self.text}"')
        elif self.name:
            words.append(f"({self.name})")
        if isinstance(self.value, bool):
            words.append("on" if self.value else "off")
        elif self.value:
            words.append(f'= "{self.value}"')
        if self.options:
            more = len(self.options) - _MAX_OPTIONS
            rest = f" and {more} more" if more > 0 else ""
            words.append(f"of {', '.join(self.options[:_MAX_OPTIONS])}{rest}")
        return " ".join(words)


@dataclass(frozen=True, kw_only=True)
class Page:
    """Contents of the page that the browser shows.

    Attributes:
        task: The task in words.
        elements: Elements in the order of the page.
        done: Whether the library's episode is over.
        reward: Its reward, without loss for time.
    """

    task: str
    elements: tuple[Element, ...]
    done: bool
    reward: float

    def text(self) -> str:
        """Return the task and the elements as text."""
        return "\n".join([self.task, *(element.line() for element in self.elements)])

    def numbered(self, number: int) -> Element:
        """Return an element by its number.

        Raises:
            ToolError: There is none.
        """
        for element in self.elements:
            if number and element.number == number:
                return element
        raise ToolError(f"there is no element {number}")

    def find(
        self, tag: str = "", *, text: str | None = None, name: str = "", nth: int = 1
    ) -> Element:
        """Return the nth element of a tag (beginning), text and name (part of it).

        Raises:
            LookupError: There is none.
        """
        found = [
            element
            for element in self.elements
            if element.number
            and element.tag.startswith(tag)
            and (text is None or element.text == text)
            and name in element.name
        ]
        if len(found) < nth:
            raise LookupError(
                f"no {tag} {text or ''} {name} number {nth} on the page: {self.text()}"
            )
        return found[nth - 1]

    def has(self, tag: str = "", *, text: str | None = None, name: str = "") -> bool:
        """Return whether there is such an element."""
        try:
            self.find(tag, text=text, name=name)
        except LookupError:
            return False
        return True

    def labeled(self) -> list[tuple[Element, str]]:
        """Return the boxes and radio buttons, each with the text behind it."""
        return [
            (element, after.text)
            for element, after in zip(self.elements, self.elements[1:], strict=False)
            if element.tag in ("input_checkbox", "input_radio")
        ]

    def behind(self, element: Element, *, name: str) -> Element:
        """Return the next element with a name behind another."""
        place = self.elements.index(element)
        return next(other for other in self.elements[place:] if name in other.name.split())


def read_page(found: Mapping[str, Any]) -> Page:
    """Return the page that the script `READ` found."""
    elements: list[Element] = []
    number = 0
    for row in found["rows"]:
        # decoration
        if not (row["text"] or row["name"] or row["value"] or row["tag"].startswith("input")):
            continue
        number += row["ref"] > 0
        elements.append(
            Element(
                number=number if row["ref"] > 0 else 0,
                ref=row["ref"],
                tag=row["tag"],
                text=row["text"],
                value=row["value"],
                name=row["name"],
                options=_texts(row["options"]),
            )
        )
    return Page(
        task=found["utterance"].strip(),
        elements=tuple(elements),
        done=bool(found["done"]),
        reward=float(found["reward"]),
    )


def _texts(options: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(options or ())
