"""The live page, as people use it: the command, a browser on a run that goes on, at a desk and on a phone."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from made_up import make_run
from small import flags

from semidfl.cli import main
from semidfl.web import serve

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SEMIDFL = (sys.executable, "-m", "semidfl")


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which a command is refused."""
    assert main(words) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    return printed.err


# --- mistakes --------------------------------------------------------------------------------------------------------


def test_wrong_words_are_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(make_run(tmp_path / "run", rounds=2))
    monkeypatch.chdir(tmp_path)
    assert "there is no folder runs here: start a run" in refusal(["watch"], capsys)
    assert "there is no run folder nowhere" in refusal(["watch", "nowhere"], capsys)
    (tmp_path / "empty").mkdir()
    assert "there is no run in" in refusal(["watch", str(tmp_path / "empty")], capsys)
    (tmp_path / "file").touch()
    assert "is a file, not a run folder" in refusal(["watch", str(tmp_path / "file")], capsys)
    assert "--port 70000 is not legal" in refusal(["watch", folder, "--port", "70000"], capsys)
    assert "--port -1 is not legal" in refusal(["watch", folder, "--port=-1"], capsys)
    assert "watch has no option --prot" in refusal(["watch", folder, "--prot", "1"], capsys)
    assert "is no address of this machine" in refusal(["watch", folder, "--host", "no.such.host.invalid"], capsys)


def test_a_port_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(make_run(tmp_path / "run", rounds=2))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = refusal(["watch", folder, "--port", str(port)], capsys)
    assert error == (
        f"semidfl: cannot listen on 127.0.0.1 port {port} (address already in use): choose another --port, "
        "or --port 0 for any that is free\n"
    )


def test_without_nicegui(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    assert "pip install 'semidfl[web]'" in refusal(["watch", str(make_run(tmp_path / "run", rounds=2))], capsys)


# --- the server ------------------------------------------------------------------------------------------------------


class Server:
    """`semidfl watch` in a process of its own."""

    def __init__(self, *words: str, cwd: Path) -> None:
        pytest.importorskip("nicegui", reason="nicegui is not installed")
        self.process = subprocess.Popen(
            [*SEMIDFL, "watch", *words, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line + self.process.stdout.read()
        self.url = found[0]
        self.base = self.url.partition("?")[0]

    def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        for _ in range(300):
            try:
                with urllib.request.urlopen(urllib.request.Request(self.base + path, headers=headers)) as answer:
                    return answer.status, answer.read()
            except urllib.error.HTTPError as error:
                return error.code, error.read()
            except urllib.error.URLError:
                time.sleep(0.1)
        raise AssertionError("the server does not answer")

    def close(self) -> str:
        self.process.terminate()
        assert self.process.stdout is not None
        out = self.process.stdout.read()
        self.process.wait(timeout=20)
        return out


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: one that has ended."""
    place = tmp_path_factory.mktemp("watch")
    make_run(place / "runs" / "first", rounds=60)
    return place


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Server]:
    server = Server("runs", cwd=place)
    yield server
    assert "Traceback" not in server.close()


def test_runs_that_cannot_be_read_leave_the_others_on_the_page(tmp_path: Path) -> None:
    for name in ("good", "damaged", "other"):
        make_run(tmp_path / "runs" / name, rounds=3)
    lines = (tmp_path / "runs/damaged/metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "runs/damaged/metrics.jsonl").write_bytes(b"{\n" + b"".join(lines))
    (tmp_path / "runs/other/config.toml").write_text("[classifier]\nflavour = 3\n")
    server = Server("runs", cwd=tmp_path)
    try:
        for name in ("good", "damaged", "other"):
            status, page = server.get(f"?run={name}")
            assert status == 200
            assert b"is damaged" in page
            assert b"flavour" in page
    finally:
        assert "Traceback" not in server.close()


def test_only_pictures_of_its_runs_are_served(server: Server, place: Path) -> None:
    assert server.get("picture?run=first&round=60")[1] == (place / "runs/first/samples/round-000060.png").read_bytes()
    for query in ("run=first&round=61", "run=../..&round=1", "run=first&round=../../config", "run=nowhere&round=60"):
        assert server.get(f"picture?{query}")[0] in (404, 422)
    assert server.get("", Host="evil.example")[0] == 403
    assert server.get("docs")[0] == 404


def test_over_the_network_a_token_is_asked_for(place: Path) -> None:
    server = Server("runs", "--host", "0.0.0.0", cwd=place)
    try:
        token = server.url.partition("?token=")[2]
        assert len(token) >= 32
        server.base = f"http://127.0.0.1:{urlsplit(server.url).port}/"
        assert server.get("")[0] == 403
        assert server.get("?token=guess")[0] == 403
        assert server.get("", Cookie=f"semidfl-token={token}")[0] == 200
    finally:
        out = server.close()
    assert "without TLS" in out


# --- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium is found: apt-get install chromium")
    with sync.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


class Visit:
    """A tab, and every address it asked for."""

    def __init__(self, browser: Any, url: str, width: int, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("websocket", lambda socket: self.requests.append(socket.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.goto(url)
        self.page.wait_for_selector("canvas")

    def said(self, card: str) -> str:
        return str(self.page.locator(f"section[aria-label='{card}'] .said").inner_text())

    def wait_for(self, script: str, timeout: float = 30_000) -> None:
        self.page.wait_for_function(script, timeout=timeout)

    def becomes(self, holds: Callable[[], bool]) -> None:
        """For what only this side sees: a picture of the page, the addresses it asked for."""
        end = time.monotonic() + 30
        while not holds():
            assert time.monotonic() < end
            self.page.wait_for_timeout(100)

    def close(self) -> None:
        hosts = {
            urlsplit(url).hostname for url in self.requests if urlsplit(url).scheme in ("http", "https", "ws", "wss")
        }
        assert hosts == {"127.0.0.1"}, "a request has left the machine"
        assert len(self.requests) > 10
        assert self.errors == []
        self.context.close()


# What the first chart has drawn of the mean, asked of ECharts itself.
POINTS = "getElement(document.querySelector('.nicegui-echart').id.slice(1)).chart.getOption().series.at(-1).data.length"


def overlaps(page: Any) -> list[str]:
    """Pairs of texts and controls that lie over each other, and what sticks out at the right."""
    return page.evaluate(
        """() => {
          const found = [], wide = document.documentElement.clientWidth;
          const what = 'h2, .said, .keys span, .tile .figure, .tile .more, .tools > *, .round, .state';
          const pieces = [...document.querySelectorAll(what)].filter(e => e.offsetParent);
          const boxes = pieces.map(e => e.getBoundingClientRect());
          boxes.forEach((a, i) => {
            if (a.width && a.right > wide + 1 && !pieces[i].closest('.scroll, .gallery'))
              found.push('sticks out: ' + pieces[i].innerText);
            boxes.forEach((b, j) => {
              if (j <= i || pieces[i].contains(pieces[j]) || pieces[j].contains(pieces[i])) return;
              const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
              const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
              const stuck = pieces[i].closest('.top') || pieces[j].closest('.top');
              if (x > 2 && y > 2 && !stuck) found.push(pieces[i].innerText + ' | ' + pieces[j].innerText);
            });
          });
          return found;
        }"""
    )


@pytest.mark.parametrize("width", [390, 1400])
def test_a_live_run(browser: Any, server: Server, place: Path, width: int) -> None:
    """The curves advance, the slider moves, a second run opens, the theme switches, and nothing leaves the machine."""
    name = f"live-{width}"
    run = subprocess.Popen(
        [*SEMIDFL, "run", "paper", *flags(name=name, rounds=400, evaluation__every=1)],
        cwd=place,
        stdout=subprocess.DEVNULL,
    )
    try:
        metrics = place / "runs" / name / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 3):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        visit = Visit(browser, f"{server.base}?run={name}", width)
        page = visit.page
        assert page.locator(".state").inner_text() == "running"
        picture = page.locator("canvas").first.screenshot()
        drawn = page.evaluate(POINTS)
        visit.wait_for(f"{POINTS} >= {drawn + 8}")
        visit.becomes(lambda: page.locator("canvas").first.screenshot() != picture)
        run.terminate()  # as Ctrl-C does: it stops after its round
        run.wait(timeout=60)
        visit.wait_for("document.querySelector('.state').innerText === 'stopped'")
        assert overlaps(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        _slide(visit)
        _second_run(visit)
        _theme(visit)
        assert overlaps(page) == []
        visit.close()
    finally:
        if run.poll() is None:
            run.kill()
            run.wait()


def _slide(visit: Visit) -> None:
    """By the keyboard alone."""
    page = visit.page
    last = page.locator(".round").inner_text()
    thumb = page.locator("[role=slider] [tabindex='0']")
    thumb.focus()
    page.keyboard.press("ArrowLeft")
    visit.wait_for(f"document.querySelector('.round').innerText !== '{last}'")
    now = page.locator(".round").inner_text()
    visit.wait_for(
        f"getComputedStyle(document.querySelector('.gallery')).getPropertyValue('--picture').includes('round={now[6:]}')"
    )
    visit.becomes(lambda: any(url.endswith(f"round={now[6:]}") for url in visit.requests))
    assert int(now[6:]) < int(last[6:])


def _second_run(visit: Visit) -> None:
    page = visit.page
    page.locator(".pick").click()
    page.locator(".q-menu .q-item", has_text="first").click()
    visit.wait_for("document.querySelector('.state').innerText === 'finished'")
    visit.wait_for("document.querySelector('.page').innerText.includes('after round 60')")
    visit.wait_for("location.search === '?run=first'")  # a message of its own, after the page's
    rows = page.locator("table.runs tbody tr").all_inner_texts()
    assert any(row.startswith("first") for row in rows)
    assert len(rows) >= 2


def _theme(visit: Visit) -> None:
    page = visit.page
    before = page.locator("canvas").first.screenshot()
    page.locator("button[aria-label='switch to the dark theme']").click()
    visit.wait_for("document.body.classList.contains('body--dark')")
    page.wait_for_selector("button[aria-label='switch to the light theme']")
    visit.wait_for("document.cookie.includes('semidfl-theme=dark')")
    visit.becomes(lambda: page.locator("canvas").first.screenshot() != before)
    page.reload()  # and it stays so
    page.wait_for_selector("canvas")
    visit.wait_for("document.body.classList.contains('body--dark')")


def test_by_keyboard_and_in_the_systems_theme(browser: Any, server: Server) -> None:
    visit = Visit(browser, f"{server.base}?run=first", 1400, "dark")
    visit.wait_for("document.body.classList.contains('body--dark')")
    reached = set()
    for _ in range(30):
        visit.page.keyboard.press("Tab")
        label = "(e => e.getAttribute('aria-label') || e.innerText.trim())(document.activeElement)"
        reached.add(visit.page.evaluate(label))
    wanted = {"run", "switch to the light theme", "play through the rounds", "labelled", "Settings"}
    assert wanted | {"client", "class", "runs"} <= reached, reached
    visit.close()


@pytest.mark.parametrize("clients", [10, 100])
def test_a_long_run_opens_soon(browser: Any, server: Server, place: Path, clients: int) -> None:
    """500 rounds after 5, on the same machine; seconds, measured alone: docs/log.md."""
    opened, switched = {}, {}
    for name, rounds in ((f"short-{clients}", 5), (f"long-{clients}", 500)):
        make_run(place / "runs" / name, clients=clients, rounds=rounds)
        server.get(f"?run={name}")
        start = time.perf_counter()
        visit = Visit(browser, f"{server.base}?run={name}", 1400)
        opened[rounds] = time.perf_counter() - start
        start = time.perf_counter()
        visit.page.locator("button[aria-label='switch to the dark theme']").click()
        visit.wait_for("document.body.classList.contains('body--dark')")
        switched[rounds] = time.perf_counter() - start
        assert _load(server.process.pid) < 0.25  # an open page leaves the processors to the training
        visit.close()
    print(f"{clients} clients: opens in {opened} s, switches its theme in {switched} s, by rounds")
    assert opened[500] < 4 * opened[5]
    assert switched[500] < 8 * switched[5]


def _load(pid: int) -> float:
    """Processor seconds a second."""

    def spent() -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    time.sleep(1.0)  # until the theme is drawn
    before = spent()
    time.sleep(2.0)
    return (spent() - before) / 2


def test_the_page_of_a_peer(browser: Any, server: Server, place: Path) -> None:
    """One client of its own, a neighbour gone."""
    folder = make_run(place / "runs" / "peer", rounds=30, done=12, missing=[7])
    (folder / ".lock").write_text("")
    known = (folder / "clients.json").read_text()
    (folder / "clients.json").write_text(re.sub(r'"own": \[[^]]*\]', '"own": [2]', known))
    visit = Visit(browser, f"{server.base}?run=peer", 390)
    assert visit.said("The network") == "Client 7 gone (12 rounds)."
    assert visit.page.locator(".state").inner_text() == "stopped"
    visit.close()
