"""The live page: one `Page` for every open browser tab, fed from the run folders once a second."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.middleware.gzip import GZipMiddleware
from fastapi.responses import FileResponse
from nicegui import ui

from semidfl.errors import SemiDFLError
from semidfl.record.history import History
from semidfl.web import charts, words
from semidfl.web.facts import details, table
from semidfl.web.gallery import Gallery
from semidfl.web.library import Library
from semidfl.web.look import DARK, LIGHT, MEANINGS, Look
from semidfl.web.network import network
from semidfl.web.panels import Chart, Tile, card, keys

__all__ = ["application"]

_CSS = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
_EVERY = 1.0
"""seconds between two looks at the folder"""
_COMPARED = 7
"""runs compared from the start, if the page was opened on several"""
_MARK = """<svg width="26" height="26" viewBox="0 0 26 26" aria-hidden="true">
<line x1="6" y1="7" x2="20" y2="8"/><line x1="6" y1="7" x2="11" y2="20"/><line x1="20" y1="8" x2="11" y2="20"/>
<circle class="l" cx="6" cy="7" r="4.2"/><circle class="m" cx="20" cy="8" r="4.2"/>
<circle class="u" cx="11" cy="20" r="4.2"/></svg>"""


def application(places: Sequence[str], far: bool = False) -> FastAPI:
    """The page and its pictures; `far` browsers get what they load packed."""
    library, app = Library(places), FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/picture")
    def picture(run: str, round: int) -> FileResponse:
        try:
            return FileResponse(library.open(run).samples[round])
        except (KeyError, SemiDFLError):
            raise HTTPException(404, "no such picture") from None

    @ui.page("/", title="semidfl", favicon="🕸")
    def page(request: Request, run: str = "") -> None:
        Page(library, run, request.cookies.get("semidfl-theme", ""))

    library.warm()
    ui.run_with(
        app,
        tailwind=False,  # the page has its own style sheet
        title="semidfl",
        binding_refresh_interval=None,
        show_welcome_message=False,
        gzip_middleware_factory=GZipMiddleware if far else None,  # on one machine packing takes longer than sending
    )
    return app


class Page:
    """What one tab shows."""

    def __init__(self, library: Library, run: str, theme: str) -> None:
        self._library, self._theme_known = library, bool(theme)
        self._look: Look = DARK if theme == "dark" else LIGHT
        names = list(library.names(run))
        self._name = run if run in names else names[0] if names else ""
        self._seen: tuple[Any, ...] = ()
        self._error = ""
        ui.add_css(_CSS)
        ui.colors(primary="#2f7fb5")
        self._dark = ui.dark_mode(self._look.dark)
        self._build(names)
        self._look_again()
        ui.timer(_EVERY, self._tick)

    # --- building ---------------------------------------------------------------------------------

    def _build(self, names: list[str]) -> None:
        self._header(names)
        with ui.element("main").classes("page"):
            self._notice = ui.html("", sanitize=False).classes("notice hidden").props('role="status"')
            with ui.element("div").classes("tiles"):
                self._tiles = {what: Tile(what) for what in ("Accuracy", "Round", "Clients", "Pseudo-labels", "Sent")}
            with card("Accuracy of every client", "wide tall") as self._accuracy_card:
                self._role_keys = ui.html("", sanitize=False).classes("keys")
                self._accuracy = Chart("test accuracy of every client over the rounds")
            with card("The network", "slim tall") as self._network_card:
                self._network_keys = ui.html("", sanitize=False).classes("keys")
                self._network = Chart("graph of the clients")
            self._comparison(names)
            with card("Generated images") as made:
                self._gallery = Gallery(made)
            self._holdings()
            self._pseudo_cards()
            self._cost_cards()
            with ui.element("section").classes("card full"):
                self._details = ui.html("", sanitize=False)

    def _header(self, names: list[str]) -> None:
        with ui.element("header").classes("top"):
            with ui.element("div").classes("top-row"):
                ui.html(f"{_MARK}semidfl", sanitize=False).classes("mark")
                self._pick = ui.select(names, value=self._name or None, on_change=self._picked).classes("pick")
                self._pick.props('outlined dense options-dense label="run"')
                ui.element("div").classes("spacer")
                self._state = ui.html("", sanitize=False).classes("state").props('role="status"')
                self._toggle = ui.button(on_click=self._switch).props("flat round dense")
            with ui.element("div").classes("bar").props('role="progressbar" aria-label="rounds done"') as self._bar:
                ui.element("div")

    def _comparison(self, names: list[str]) -> None:
        with card("Runs compared", "full") as self._compare_card:
            with self._compare_card.tools:
                self._compared = ui.select(names, multiple=True, value=names[:_COMPARED], on_change=self._update)
                self._compared.props('outlined dense options-dense label="runs"')
                self._compared.props('display-value="choose"').style("min-width: 130px")
            self._compare_keys = ui.html("", sanitize=False).classes("keys")
            self._compare = Chart("mean accuracy of the chosen runs over the rounds")
            self._table = ui.html("", sanitize=False).classes("scroll")

    def _pseudo_cards(self) -> None:
        with card("Pseudo-labels given") as self._given_card:
            self._given = Chart("samples with a pseudo-label over the rounds")
        with card("How many are right") as self._right_card:
            self._right_keys = ui.html("", sanitize=False).classes("keys")
            self._right = Chart("share of right pseudo-labels over the rounds")
        with card("Pseudo-labels by class") as self._class_card:
            self._class_keys = ui.html("", sanitize=False).classes("keys")
            self._class = Chart("pseudo-labels of each class, right and wrong")
        with card("Thresholds by class") as self._threshold_card:
            with self._threshold_card.tools:
                self._whose = ui.select(["mean of all"], value="mean of all", on_change=self._update)
                self._whose.props('outlined dense options-dense label="client"')
            self._thresholds = Chart("threshold of each class over the rounds")

    def _holdings(self) -> None:
        with card("Who holds what", "high") as self._held_card:
            with self._held_card.tools:
                self._kind = ui.toggle(["labelled", "unlabelled"], value="unlabelled", on_change=self._update)
                self._kind.props('dense unelevated no-caps toggle-color=primary aria-label="kind of samples"')
            self._held = Chart("samples of each class at each client")

    def _cost_cards(self) -> None:
        with card("Time by phase") as self._time_card:
            self._time_keys = ui.html("", sanitize=False).classes("keys")
            self._time = Chart("seconds of each phase over the rounds")
        with card("Bytes sent") as self._sent_card:
            self._sent_keys = ui.html("", sanitize=False).classes("keys")
            self._sent = Chart("megabytes that a client sends in a round, by topic")

    # --- what the visitor does --------------------------------------------------------------------

    def _picked(self, event: Any) -> None:
        if event.value and event.value != self._name:
            self._name = event.value
            name = json.dumps(self._name)
            ui.run_javascript(f"history.replaceState(null, '', '?run=' + encodeURIComponent({name}))")
            self._update()

    def _switch(self) -> None:
        self._wear(LIGHT if self._look.dark else DARK)
        value = "dark" if self._look.dark else "light"
        ui.run_javascript(f"document.cookie = 'semidfl-theme={value}; max-age=31536000; samesite=strict; path=/'")

    def _wear(self, look: Look) -> None:
        self._look = look
        self._dark.set_value(look.dark)
        self._update()

    # --- following the run ------------------------------------------------------------------------

    async def _tick(self) -> None:
        if not self._theme_known:
            self._theme_known = True
            with suppress(TimeoutError):  # a browser that is too slow to say it keeps the light look
                if await ui.run_javascript("matchMedia('(prefers-color-scheme: dark)').matches"):
                    self._wear(DARK)
        # In a thread: while a long file is read, other tabs are served.
        await asyncio.to_thread(self._read)
        self._look_again()

    def _read(self) -> None:
        """A run that cannot be read says so, and the others are shown all the same."""
        errors = []
        for name in sorted({self._name, *self._chosen()} & self._library.names().keys()):
            try:
                self._library.open(name).refresh()
            except SemiDFLError as error:
                errors.append(str(error))
        self._error = "; ".join(errors)

    def _chosen(self) -> list[str]:
        return list(self._compared.value or [])

    def _look_again(self) -> None:
        """Draws anew if anything has changed."""
        names = list(self._library.names())
        if names != self._pick.options:
            self._pick.set_options(names)
            self._compared.set_options(names)
            if not self._name and names:
                self._pick.set_value(names[0])
        if not self._seen:
            self._read()
        seen = self._fingerprint(names)
        if seen != self._seen:
            self._update()
            self._seen = seen

    def _fingerprint(self, names: list[str]) -> tuple[Any, ...]:
        runs = []
        for name in (self._name, *self._chosen()):
            with suppress(SemiDFLError):
                runs += [self._library.open(name)] if name in names else []
        return (self._error, tuple((run.folder, run.rounds, run.status, len(run.samples)) for run in runs))

    def _update(self) -> None:
        self._notice.classes(remove="hidden") if self._error else self._notice.classes("hidden")
        self._notice.set_content(escape(self._error))
        look = self._look
        self._toggle.props(f"icon={'light_mode' if look.dark else 'dark_mode'}")
        self._toggle.props(f'aria-label="switch to the {"light" if look.dark else "dark"} theme"')
        try:
            run = self._library.open(self._name)
        except (KeyError, SemiDFLError):
            return
        self._show_figures(run)
        self._show_accuracy(run, look)
        self._show_comparison(look)
        self._gallery.show(self._name, run, look)
        self._show_pseudo(run, look)
        self._show_cost(run, look)
        self._show_details(run)

    def _show_figures(self, run: History) -> None:
        state, rounds, known = run.status, run.config.rounds, run.clients
        self._state.set_content(state)
        self._state.classes(state, remove=" ".join({"running", "finished", "stopped"} - {state}))
        self._bar.style(f"--done: {run.rounds / max(1, rounds):.4f}")
        self._bar.props(f"aria-valuenow={run.rounds} aria-valuemax={rounds}")
        tested, values = run.table("accuracy")
        last = values[-1] * 100 if tested else None
        spread = f"± {last.std():.2f}" if last is not None and len(last) > 1 else ""
        self._tiles["Accuracy"].show(
            "–" if last is None else f"{last.mean():.2f} %",
            spread,
            f"after round {tested[-1]}" if tested else "no test yet",
        )
        pace = words.pace(run)
        left = f"{words.duration(pace * (rounds - run.rounds))} left" if state == "running" and pace else ""
        spent = words.duration(sum(run.named("seconds")[1].get("round", [])))
        self._tiles["Round"].show(f"{run.rounds:,}", f"of {rounds:,}", left or f"{spent} of work")
        absent = len(run.absent())
        self._tiles["Clients"].show(
            str(len(known.roles)), f"{absent} missing" if absent else "", words.roles_words(run)
        )
        given, right = run.table("pseudo_labels")[1], words.right_share(run)
        self._tiles["Pseudo-labels"].show(
            f"{int(given[-1].sum()):,}" if len(given) else "–",
            f"of {run.looked_at():,}" if len(given) and run.looked_at() else "",
            f"{100 * right:.1f} % of them right" if right is not None else "",
        )
        now, total = words.traffic(run)
        self._tiles["Sent"].show(words.amount(now), "a round", f"by a client; {words.amount(total)} in all")

    def _show_accuracy(self, run: History, look: Look) -> None:
        self._accuracy_card.say(words.accuracy_words(run))
        roles = [
            (f"{r}: {MEANINGS[r]}", look.roles[r], "")
            for r in "LMU"
            if r in {run.clients.role(i) for i in run.clients.own}
        ]
        self._role_keys.set_content(keys([*roles, ("mean", look.ink, "")]))
        self._accuracy.show(charts.accuracy(run, look))
        self._network_card.show(bool(run.clients.edges))
        self._network_card.say(words.network_words(run))
        dots = [(f"{r}: {MEANINGS[r]}", look.roles[r], "dot") for r in "LMU" if r in run.clients.roles]
        absent = [("late", "", "ring"), ("gone", "", "ring gone")] if run.absent() else []
        self._network_keys.set_content(keys(dots + absent))
        self._network.show(network(run, look))

    def _show_comparison(self, look: Look) -> None:
        names = self._library.names()
        self._compare_card.show(len(names) > 1)
        runs = []
        for name in self._chosen():
            with suppress(KeyError, SemiDFLError):
                run = self._library.open(name)
                if not run.records:
                    run.refresh()
                runs.append((name, run))
        self._compare_card.say(f"{len(runs)} of {len(names)} runs: the mean over each run's clients.")
        self._compare_keys.set_content(keys([(name, look.series[k % 7], "") for k, (name, _) in enumerate(runs)]))
        self._compare.show(charts.comparison(runs, look))
        self._table.set_content(table(runs, look))

    def _show_pseudo(self, run: History, look: Look) -> None:
        given = bool(run.table("pseudo_labels")[0])
        right = words.right_share(run)
        self._given_card.show(given)
        self._given_card.say(words.labels_words(run))
        self._given.show(charts.pseudo_labels(run, look))
        self._right_card.show(right is not None)
        self._right_card.say(f"{100 * (right or 0):.1f} % in the last round; the truth is used for this chart only.")
        self._right_keys.set_content(
            keys([("all clients", look.series[2], ""), ("best and worst client", look.faint, "")])
        )
        self._right.show(charts.precision(run, look))
        by_class = any("pseudo_given" in r for r in run.records)
        self._class_card.show(by_class)
        self._class_card.say(f"All clients, round {run.rounds}.")
        self._class_keys.set_content(keys([("right", look.right, ""), ("wrong", look.wrong, "")]))
        self._class.show(charts.classes_labelled(run, look))
        self._threshold_card.show(any("thresholds" in r for r in run.records))
        self._threshold_card.say("Confidence above which a sample gets its label.")
        self._whose.set_options(["mean of all", *(f"client {i}" for i in run.clients.own)])
        if self._whose.value not in self._whose.options:
            self._whose.set_value("mean of all")
        whose = str(self._whose.value)
        client = int(whose.removeprefix("client ")) if whose.startswith("client ") else None
        self._thresholds.show(charts.thresholds(run, look, client))
        self._held_card.show(bool(run.clients.labelled))
        kind = str(self._kind.value)
        self._held_card.say(f"Samples of each class that a client trains on, {kind}.")
        self._held.show(charts.holdings(run, look, kind))

    def _show_cost(self, run: History, look: Look) -> None:
        self._time_card.say(words.time_words(run))
        _now, total = words.traffic(run)
        self._sent_card.say(f"{words.amount(total)} a client so far; what a client publishes, once to each neighbour.")
        for chart, legend, options in (
            (self._time, self._time_keys, charts.seconds(run, look)),
            (self._sent, self._sent_keys, charts.bytes_sent(run, look)),
        ):
            legend.set_content(keys([(s["name"], s["itemStyle"]["color"], "") for s in options["series"]]))
            chart.show(options)

    def _show_details(self, run: History) -> None:
        self._details.set_content(details(run))
