"""Scripted policies for MiniWoB's tasks: the next call of a tool, from the page and the fields of the task."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from ...envs.tools import call_text
from ..adapters.miniwob_pages import Element, Page

Fields = Mapping[str, str]
TaskPolicy = Callable[[Page, Fields], str]


def _click(element: Element) -> str:
    return call_text("click", element=element.number)


def _typed(element: Element, text: str) -> str | None:
    """Return the call that fills a field, None where it is filled."""
    if element.value == text:
        return None
    return call_text("type", element=element.number, text=text)


def _click_text(tag: str) -> TaskPolicy:
    return lambda page, fields: _click(page.find(tag, text=fields["target"]))


def _click_boxes(page: Page, fields: Fields) -> str:
    wanted = {value for name, value in fields.items() if name.startswith("target")}
    for element, label in page.labeled():
        if bool(element.value) != (label in wanted):
            return _click(element)
    return _click(page.find("button"))


def _click_option(page: Page, fields: Fields) -> str:
    for element, label in page.labeled():
        if label == fields["target"] and not element.value:
            return _click(element)
    return _click(page.find("button"))


def _choose(page: Page, fields: Fields) -> str:
    field = page.find("select")
    if field.value != fields["target"]:
        return call_text("select", element=field.number, option=fields["target"])
    return _click(page.find("button"))


def _enter(count: int, *, key: str = "target") -> TaskPolicy:
    """Return a policy that types a text into the first fields and clicks the first button."""

    def play(page: Page, fields: Fields) -> str:
        for nth in range(1, count + 1):
            if call := _typed(page.find("input", nth=nth), fields[key]):
                return call
        return _click(page.find("button"))

    return play


def _enter_date(page: Page, fields: Fields) -> str:
    month, day, year = fields["target"].split("/")
    date = f"{year}-{month}-{day}"
    return _typed(page.find("input_date"), date) or _click(page.find("button"))


def _log_in(page: Page, fields: Fields) -> str:
    return (
        _typed(page.find("input_text"), fields["username"])
        or _typed(page.find("input_password"), fields["password"])
        or _click(page.find("button"))
    )


def _form_2(page: Page, fields: Fields) -> str:
    radio = page.find("input_radio", nth=int(fields["radio target"]))
    if not radio.value:
        return _click(radio)
    field = page.find("input_text", nth=int(fields["textbox target"]))
    return _typed(field, fields["textbox text"]) or _click(page.find("button"))


def _mail(page: Page, fields: Fields) -> str:
    if page.has("textarea"):
        if fields["task"] == "forward":
            receiver = page.find(name="forward-sender")
            return _typed(receiver, fields["to"]) or _click(page.find(name="send-forward"))
        return _typed(page.find("textarea"), fields["message"]) or _click(page.find(name="send"))
    sender = page.find(text=fields["by"], name="email-sender")
    if fields["task"] in ("delete", "star"):
        name = "trash" if fields["task"] == "delete" else "star"
        return _click(page.behind(sender, name=name))
    # of an e-mail that is open
    if page.has("div", text=fields["task"].capitalize()):
        return _click(page.find("div", text=fields["task"].capitalize()))
    return _click(sender)


POLICIES: dict[str, tuple[int, TaskPolicy]] = {
    "click-button": (1, _click_text("button")),
    "click-link": (1, _click_text("span")),
    "enter-text": (2, _enter(1)),
    "enter-date": (2, _enter_date),
    "choose-list": (2, _choose),
    "click-option": (2, _click_option),
    "enter-password": (3, _enter(2)),
    "login-user": (3, _log_in),
    "form-sequence-2": (3, _form_2),
    "click-checkboxes": (4, _click_boxes),
    "email-inbox-delete": (1, _mail),
    "email-inbox-noscroll": (4, _mail),
}
"""Tasks, each with about as many calls as it takes and its policy."""


def search(page: Page, call: str) -> str:
    """Return how a call's element is found: those of its kind up to it, each with its number and its label.

    An example is `find Cancel: 2 Yes, 3 No, 4 Cancel`. What has no label is called by its kind and place, `radio 2`.
    """
    target = page.numbered(json.loads(call)["arguments"]["element"])
    labels = {element.ref: label for element, label in page.labeled()}
    kind = [element for element in page.elements if element.number and element.tag == target.tag]
    seen = [
        (labels.get(element.ref) or element.text or element.name or f"{element.kind} {place}")
        for place, element in enumerate(kind[: kind.index(target) + 1], start=1)
    ]
    steps = (f"{element.number} {label}" for element, label in zip(kind, seen, strict=False))
    return f"find {seen[-1]}: {', '.join(steps)}"
