"""SVG of untrusted origin: reading it into simple shapes, rendering these, and comparing two renderings.

Only the shapes, attributes and numbers listed here reach the renderer. Everything else is refused: entities,
references, styles, scripts, text, images and transformations.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..envs.adapters.pictures import on_white

RGBImage = NDArray[np.uint8]
"""RGB, `[side, side, 3]`."""

MAX_SHAPES = 64
MAX_DEPTH = 6
# Beyond 32,767 pixels from the canvas the renderer's numbers overflow, which may end the process.
_MAX_PIXELS = 30_000
# images that are kept, and the memory that those of a size take at most
_MAX_KEPT, _MAX_KEPT_BYTES = 1024, 64 * 2**20
_NAMESPACE = "{http://www.w3.org/2000/svg}"
_WHITE = 255

# without exponents: the number of digits bounds the value
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,5}(?:\.[0-9]{0,8})?|\.[0-9]{1,8})(?![0-9])")
_COLOR = re.compile(r"[a-zA-Z]{1,24}|#(?:[0-9a-fA-F]{3}){1,2}")
_POINTS_BETWEEN = re.compile(r"[\s,]*")
_PATH_PARTS = re.compile(r"([A-Za-z]?)([^A-Za-z]+)")
_PATH_BETWEEN = re.compile(r"[MmLlHhVvCcSsQqTtAaZz\s,]*")

_PAINT = {
    **dict.fromkeys(("fill", "stroke"), "color"),
    **dict.fromkeys(("stroke-width", "opacity", "fill-opacity", "stroke-opacity"), "number"),
}
_SHAPES = {
    "rect": dict.fromkeys(("x", "y", "width", "height", "rx", "ry"), "number"),
    "circle": dict.fromkeys(("cx", "cy", "r"), "number"),
    "ellipse": dict.fromkeys(("cx", "cy", "rx", "ry"), "number"),
    "line": dict.fromkeys(("x1", "y1", "x2", "y2"), "number"),
    "polygon": {"points": "points"},
    "polyline": {"points": "points"},
    "path": {"d": "path"},
}
# of the outermost element; viewBox is read apart
_IGNORED = frozenset(("width", "height", "version"))


class SvgError(ValueError):
    """The text is no SVG of the accepted kind; with the reason."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Accepted shapes.

    Attributes:
        view_box: Left, top, width and height of the visible square.
        body: The shapes as SVG, written anew.
        reach: Bound of the distance of their points and of the ends of their curves' handles from the origin.
    """

    view_box: tuple[float, float, float, float]
    body: str = ""
    reach: float = 0.0


def read_svg(text: str, *, size: float) -> Drawing:
    """Read an SVG document, or shapes without the element around them.

    Args:
        text: Untrusted text.
        size: Width and height of the canvas where the text gives no `viewBox`.

    Raises:
        SvgError: The text is not accepted.

    >>> read_svg('<rect width="1" height="1" fill="red" />', size=4).body
    '<rect width="1" height="1" fill="red"/>'
    """
    # declarations, entities, comments, instructions
    if any(mark in text for mark in ("<!", "<?", "&")):
        raise SvgError("only plain elements are accepted")
    document = text if text.lstrip().startswith("<svg") else f"<svg>{text}</svg>"
    try:
        root = ElementTree.fromstring(document)
    # half a surrogate pair is a UnicodeEncodeError
    except (ElementTree.ParseError, ValueError):
        raise SvgError("it is no well-formed SVG") from None
    if _name(root) != "svg":
        raise SvgError("the outermost element is not svg")
    view_box = _view_box(root, size=size)
    body, count = _written_all(root, depth=1)
    if count > MAX_SHAPES:
        raise SvgError(f"it has {count} elements, more than {MAX_SHAPES}")
    return Drawing(view_box=view_box, body=body, reach=_reach(root))


def _view_box(root: ElementTree.Element, *, size: float) -> tuple[float, float, float, float]:
    for name in root.attrib:
        if name not in _IGNORED and name != "viewBox":
            raise SvgError(f"svg takes no {_shown(name)}")
    text = root.get("viewBox")
    if text is None:
        return (0.0, 0.0, size, size)
    parts = text.replace(",", " ").split()
    if len(parts) != 4 or not all(_NUMBER.fullmatch(part) for part in parts):
        raise SvgError("viewBox is not four numbers")
    left, top, width, height = map(float, parts)
    # a renderer would stretch or crop another canvas
    if width != height or width < 0.01:
        raise SvgError("the canvas of viewBox is not a square")
    return (left, top, width, height)


def _written_all(element: ElementTree.Element, *, depth: int) -> tuple[str, int]:
    """Return the accepted elements inside an element as text, and their number."""
    if depth > MAX_DEPTH:
        raise SvgError(f"its elements are nested more than {MAX_DEPTH} deep")
    texts = [element.text, *(child.tail for child in element)]
    if any(text and text.strip() for text in texts):
        raise SvgError("it has text outside of its elements")
    written, count = [], 0
    for child in element:
        name = _name(child)
        if name == "g":
            inside, number = _written_all(child, depth=depth + 1)
            written.append(f"<g{_attributes(child, {})}>{inside}</g>")
            count += number + 1
            continue
        if name not in _SHAPES:
            raise SvgError(f"element {_shown(name)} is not one of g, {', '.join(_SHAPES)}")
        if len(child) or (child.text and child.text.strip()):
            raise SvgError(f"{name} is not empty")
        written.append(f"<{name}{_attributes(child, _SHAPES[name])}/>")
        count += 1
    return "".join(written), count


def _attributes(element: ElementTree.Element, own: dict[str, str]) -> str:
    kinds, written = _PAINT | own, []
    for name, value in element.attrib.items():
        kind = kinds.get(name)
        if kind is None:
            raise SvgError(f"{_name(element)} takes no {_shown(name)}")
        if not _READS[kind](value.strip()):
            raise SvgError(f"{name} is no {kind}")
        written.append(f' {name}="{value.strip()}"')
    return "".join(written)


def _numbers_between(between: re.Pattern[str]) -> Callable[[str], bool]:
    """Return a test whether a text is numbers with only accepted characters between them."""
    return lambda text: between.fullmatch(_NUMBER.sub(" ", text)) is not None


_READS: dict[str, Callable[[str], bool]] = {
    "number": lambda text: _NUMBER.fullmatch(text) is not None,
    "color": lambda text: _COLOR.fullmatch(text) is not None,
    "points": _numbers_between(_POINTS_BETWEEN),
    "path": _numbers_between(_PATH_BETWEEN),
}


def _reach(root: ElementTree.Element) -> float:
    """Return the bound `Drawing.reach`; strokes and their corners reach beyond points."""
    extents = [_extent(element) for element in root.iter() if _name(element) in _SHAPES]
    widths = [abs(float(element.get("stroke-width", "1"))) for element in root.iter()]
    return max(extents) + 2 * max(widths) if extents else 0.0


def _extent(element: ElementTree.Element) -> float:
    extent = 0.0
    for name, kind in _SHAPES[_name(element)].items():
        value = element.get(name, "0")
        extent += abs(float(value)) if kind == "number" else _extent_of_points(value)
    return extent


def _extent_of_points(text: str) -> float:
    """Return a bound of the distance of points from the origin, those of a path with its commands."""
    farthest, moved, factor = 0.0, 0.0, 1.0
    for command, arguments in _PATH_PARTS.findall(text):
        numbers = [abs(float(number)) for number in _NUMBER.findall(arguments)]
        if command.islower():
            moved += sum(numbers)
        else:
            farthest = max([farthest, *numbers])
        # an arc is twice as wide as its radius, and a mirrored handle may be as far again from each point
        factor += {"A": 2.0, "S": 2.0, "T": 2.0 * len(numbers)}.get(command.upper(), 0.0)
    return factor * (farthest + moved)


def _name(element: ElementTree.Element) -> str:
    return str(element.tag).removeprefix(_NAMESPACE)


def _shown(text: str) -> str:
    return ascii(text[:20])


def render(drawing: Drawing, *, side: int) -> RGBImage:
    """Render a drawing on white, `[side, side, 3]`. The array is read-only.

    Raises:
        SvgError: It reaches too far beyond the canvas, or the renderer refuses it.
    """
    left, top, width, _ = drawing.view_box
    if (drawing.reach + max(abs(left), abs(top))) * side > _MAX_PIXELS * width:
        raise SvgError("it reaches too far beyond the canvas")
    box = " ".join(f"{number:g}" for number in drawing.view_box)
    text = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}">{drawing.body}</svg>'
    return _renderer(side)(text)


@functools.cache
def _renderer(side: int) -> Callable[[str], RGBImage]:
    """Return a renderer that keeps images.

    The episodes of a group have the same image to copy, and a right answer draws it once more.
    """
    most = min(_MAX_KEPT, _MAX_KEPT_BYTES // (3 * side**2))
    return functools.lru_cache(maxsize=most)(functools.partial(_rendered, side=side))


def _rendered(text: str, side: int) -> RGBImage:
    import resvg_py

    try:
        png = resvg_py.svg_to_bytes(
            svg_string=text, width=side, height=side, background="white", skip_system_fonts=True
        )
    except ValueError:
        raise SvgError("it cannot be drawn") from None
    image = on_white(Image.open(io.BytesIO(png)))
    image.setflags(write=False)  # it is shared
    return image


def color_match(image: RGBImage, target: RGBImage) -> float:
    """Return the similarity of colours above that of a blank page, from 0 to 1.

    It is `1 - |image - target| / |white - target|`, summed over pixels and channels. If less than half of the target
    is drawn on, white is the median of each channel, and no page of one colour matches better than a blank one.

    >>> white, black = np.full((2, 2, 3), 255, np.uint8), np.zeros((2, 2, 3), np.uint8)
    >>> color_match(white, black), color_match(black, black)
    (0.0, 1.0)
    """
    return _match(image.astype(np.int64), target.astype(np.int64), blank=_WHITE)


def outline_match(image: RGBImage, target: RGBImage) -> float:
    """Return the similarity of the areas drawn on above that of a blank page, from 0 to 1."""
    return _match(_drawn_on(image), _drawn_on(target), blank=0)


def _drawn_on(image: RGBImage) -> NDArray[np.int64]:
    red, green, blue = np.moveaxis(image, -1, 0)
    # a channel that is not white clears a bit; several times as fast as `any` over the last axis
    return ((red & green & blue) != _WHITE).astype(np.int64)


def _match(value: NDArray[np.int64], target: NDArray[np.int64], *, blank: int) -> float:
    whole = int(np.abs(target - blank).sum())
    return max(0.0, 1.0 - int(np.abs(value - target).sum()) / whole) if whole else 0.0
