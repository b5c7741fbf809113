"""Generated images: a row a client, a column a class, a slider over the rounds.

A round's images lie in one picture. The browser cuts the cells out of it, so moving the slider changes one address.
"""

from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import urlencode

from nicegui import ui

from semidfl.record.history import History
from semidfl.web.look import Look
from semidfl.web.panels import Card

__all__ = ["Gallery"]

_GAP = 2
"""pixels between two images of a picture, see record/images.py"""
_ZOOM = 1.04
"""a little off each edge: no gap shines through where a cell is not a whole number of pixels wide"""
_WAIT = 0.7
"""seconds a picture stands while playing"""


class Gallery:
    """Lives in a card; `show` follows the run."""

    def __init__(self, card: Card) -> None:
        self._card, self._rounds, self._grid, self._label = card, list[int](), "", ""
        self._run: History | None = None
        with card.tools:
            self._client = _choice("client")
            self._class = _choice("class")
        with ui.element("div").classes("slide"):
            self._play = ui.button(icon="play_arrow", on_click=self._toggle).props(
                'flat round dense aria-label="play through the rounds"'
            )
            self._slider = ui.slider(min=0, max=1, step=1, value=0, on_change=self._moved).props(
                'aria-label="round of the generated images" snap'
            )
            self._where = ui.html("", sanitize=False).classes("round").props('aria-live="polite"')
        self._cells = ui.html("", sanitize=False).classes("gallery").props("tabindex=0")
        self._timer = ui.timer(_WAIT, self._next, active=False)
        for choice in (self._client, self._class):
            choice.on_value_change(lambda _: self._draw())

    def show(self, label: str, run: History, look: Look) -> None:
        """The pictures there are now; a slider that stood at the last one follows."""
        rounds = list(run.samples)
        self._card.show(bool(rounds))
        if label != self._label:
            self._client.set_value("all clients")
            self._class.set_value("all classes")
        at_end = label != self._label or not self._rounds or self._slider.value >= len(self._rounds) - 1
        self._label, self._run, self._look, self._rounds = label, run, look, rounds
        if not rounds:
            return
        self._slider.props(f"max={max(1, len(rounds) - 1)}")
        if at_end:
            self._slider.set_value(len(rounds) - 1)
        known = run.clients.samples
        self._client.set_options(["all clients", *(f"client {i}" for i in known.get("clients", []))])
        self._class.set_options(["all classes", *dict.fromkeys(map(str, known.get("classes", [])))])
        self._draw()

    def _moved(self) -> None:
        self._draw()

    def _toggle(self) -> None:
        self._timer.active = not self._timer.active
        self._play.props(f"icon={'pause' if self._timer.active else 'play_arrow'}")

    def _next(self) -> None:
        if self._rounds:
            self._slider.set_value((int(self._slider.value) + 1) % len(self._rounds))

    def _draw(self) -> None:
        if self._run is None or not self._rounds:
            return
        t = self._rounds[min(int(self._slider.value), len(self._rounds) - 1)]
        self._where.set_content(f"round {t}")
        self._card.say(
            f"Drawn from the clients' own generators in round {t}; {len(self._rounds)} rounds have pictures."
        )
        grid = _grid(self._run, self._run.samples[t], str(self._client.value), str(self._class.value), self._look)
        if grid != self._grid:
            self._grid = grid
            self._cells.set_content(grid)
        address = "/picture?" + urlencode({"run": self._label, "round": t})
        self._cells.style(f"--picture: url('{address}')")


def _choice(kind: str) -> ui.select:
    every = "all clients" if kind == "client" else "all classes"
    return ui.select([every], value=every).props(f'outlined dense options-dense label="{kind}"')


def _grid(run: History, picture: Path, client: str, kind: str, look: Look) -> str:
    """The cells, with the names of rows and columns."""
    rows, columns = run.clients.samples.get("clients", []), list(map(str, run.clients.samples.get("classes", [])))
    if not rows or not columns:  # a folder of an older version: the picture as it is
        return '<img style="max-width:100%;content:var(--picture);image-rendering:pixelated" alt="generated images">'
    chosen = [k for k, i in enumerate(rows) if client in ("all clients", f"client {i}")]
    kinds = list(dict.fromkeys(columns))
    shown = [k for k in kinds if kind in ("all classes", k)]
    # Of all classes one image each; of one class, or of one client, all there are.
    every = len(shown) == 1 or len(chosen) == 1
    places = [[c for c, name in enumerate(columns) if name == k][: None if every else 1] for k in shown]
    if len(chosen) == 1 and len(shown) > 1:
        lines = [(chosen[0], [p[n] if n < len(p) else -1 for p in places]) for n in range(max(map(len, places)))]
    else:
        lines = [(row, [c for p in places for c in p]) for row in chosen]
    heads = shown if len(lines[0][1]) == len(shown) else [shown[0]] * len(lines[0][1])
    across, down = _cuts(picture, len(rows), len(columns))
    cells = ["<b></b>", *(f"<b title='{escape(name)}'>{escape(name)}</b>" for name in heads)]
    for row, places_of in lines:
        cells.append(f"<b class='who' style='--c:{look.roles[run.clients.role(rows[row])]}'>{rows[row]}</b>")
        for c in places_of:
            cut = f"<i style='--x:{across.place(c)};--y:{down.place(row)}'></i>"
            cells.append(cut if c >= 0 else "<b></b>")
    size = 48 if len(lines) > 4 else 72
    style = f"--n:{len(lines[0][1])};--size:{size}px;--bw:{across.size:.3f}%;--bh:{down.size:.3f}%"
    label = "role='img' aria-label='generated images by client and class'"
    return f"<div class='cells' {label} style='{style}'>{''.join(cells)}</div>"


@dataclass(frozen=True)
class _Cut:
    """How the browser cuts one image out of a picture along one axis."""

    count: int
    """images along it"""
    whole: float
    """length of the picture, in images"""

    @property
    def size(self) -> float:
        """Of the picture as a background, in percent of a cell."""
        return 100 * _ZOOM * self.whole

    def place(self, k: int) -> str:
        """Of the background, so that the middle of image k is the middle of the cell."""
        step = (self.whole - 1) / max(1, self.count - 1)
        moved = 0.5 - (k * step + 0.5) * _ZOOM
        return f"{100 * moved / (1 - _ZOOM * self.whole):.4f}%"


def _cuts(picture: Path, rows: int, columns: int) -> tuple[_Cut, _Cut]:
    """Across and down."""
    from PIL import Image

    with Image.open(picture) as opened:
        width, height = opened.size
    across, down = (width + _GAP) / columns - _GAP, (height + _GAP) / rows - _GAP
    return _Cut(columns, width / across), _Cut(rows, height / down)
