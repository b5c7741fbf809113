"""Pieces of the page: a card, a figure in large type, a chart that is sent again only when it has changed."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

from nicegui import ui

__all__ = ["Card", "Chart", "Tile", "card", "keys"]


class Tile:
    """A figure with what it is and one more line."""

    def __init__(self, what: str) -> None:
        with ui.element("div").classes("tile"):
            ui.html(escape(what), sanitize=False).classes("what")
            self._figure = ui.html("", sanitize=False).classes("figure")
            self._more = ui.html("", sanitize=False).classes("more")

    def show(self, figure: str, small: str = "", more: str = "") -> None:
        self._figure.set_content(f"{escape(figure)} <small>{escape(small)}</small>" if small else escape(figure))
        self._more.set_content(escape(more) or "&nbsp;")


class Card:
    """A panel of the page: heading, a sentence, tools at the right."""

    def __init__(self, title: str, kind: str) -> None:
        self.box = ui.element("section").classes(f"card {kind}").props(f'aria-label="{escape(title)}"')
        with self.box, ui.element("div").classes("head"):
            with ui.element("div"):
                ui.html(escape(title), tag="h2", sanitize=False)
                self._said = ui.html("", sanitize=False).classes("said")
            self.tools = ui.element("div").classes("tools")

    def say(self, words: str) -> None:
        self._said.set_content(escape(words))

    def show(self, visible: bool) -> None:
        self.box.classes(remove="hidden") if visible else self.box.classes("hidden")


@contextmanager
def card(title: str, kind: str = "") -> Iterator[Card]:
    """A card to fill."""
    made = Card(title, kind)
    with made.box:
        yield made


class Chart:
    """An ECharts chart. `show` sends options only where they differ from what the browser has."""

    def __init__(self, label: str) -> None:
        self.element = ui.echart({}).props(f'role="img" aria-label="{escape(label)}"')
        self._shown: dict[str, Any] = {}

    def show(self, options: dict[str, Any]) -> None:
        if options == self._shown:
            return
        self._shown = options
        self.element.options.clear()
        self.element.options.update(options)


def keys(entries: Iterable[tuple[str, str, str]]) -> str:
    """A legend as HTML: (text, colour, class of the sign)."""
    return "".join(
        f'<span><i class="{escape(kind)}" style="--c:{escape(colour)}"></i>{escape(text)}</span>'
        for text, colour, kind in entries
    )
