"""Who may see the live page: spoken to as a browser, a stranger's site and a stranger would."""

import asyncio
from typing import Any

import pytest

from semidfl.web.guard import Guard, is_loopback

TOKEN = "a-secret"


def ask(guard: Guard, path: str = "/", kind: str = "http", **headers: str) -> list[dict[str, Any]]:
    """What the guard sends back; a single "passed" where the page itself was reached."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> None:
        raise AssertionError("nothing is to be received here")

    where, _, query = path.partition("?")
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": kind, "path": where, "query_string": query.encode(), "headers": pairs}
    asyncio.run(guard(scope, receive, send))
    return sent


async def page(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "passed"})


PASSED = [{"type": "passed"}]


@pytest.mark.parametrize("host", ["127.0.0.1:8470", "localhost:8470", "[::1]:8470", "localhost"])
def test_this_machine_needs_no_token(host: str) -> None:
    assert ask(Guard(page), host=host, origin=f"http://{host}") == PASSED


@pytest.mark.parametrize(
    "host", ["evil.example:8470", "127.0.0.1.evil.example", "192.168.1.2", "", "localhost@evil.example", "[::1"]
)
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_a_name_that_points_here_is_refused(host: str, kind: str) -> None:
    """DNS rebinding: the visitor's browser is here, the page that asks is not."""
    first = ask(Guard(page), kind=kind, host=host)[0]
    assert first.get("status", first.get("code")) in (403, 1008)


@pytest.mark.parametrize("token", ["", TOKEN])
@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:9999", "http://["])
def test_another_sites_requests_are_refused(origin: str, token: str) -> None:
    answer = ask(
        Guard(page, token), kind="websocket", host="127.0.0.1:8470", origin=origin, cookie=f"semidfl-token={TOKEN}"
    )
    assert answer[0]["type"] == "websocket.close"


@pytest.mark.parametrize("token", ["", TOKEN])
@pytest.mark.parametrize(
    ("mode", "dest", "site", "passes"),
    [
        ("no-cors", "image", "cross-site", False),
        ("no-cors", "script", "same-site", False),  # another port of this machine is the same site
        ("navigate", "iframe", "cross-site", False),
        ("navigate", "document", "cross-site", True),  # a link to the page, say in a chat
        ("no-cors", "image", "same-origin", True),
        ("navigate", "document", "none", True),  # typed
    ],
)
def test_what_another_page_shows_of_this_one_is_refused(
    token: str, mode: str, dest: str, site: str, passes: bool
) -> None:
    """Browsers send no origin with pictures and frames, but say where they were asked for."""
    fetch = {"sec_fetch_mode": mode, "sec_fetch_dest": dest, "sec_fetch_site": site}
    answer = ask(Guard(page, token), host="127.0.0.1:8470", cookie=f"semidfl-token={TOKEN}", **fetch)
    assert (answer == PASSED) is passes


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("path", ["/", "/?token=wrong", "/?token=", "/?token=a-secre", "/picture?run=x&round=1"])
def test_without_the_token_nothing_is_shown(path: str, kind: str) -> None:
    first = ask(Guard(page, TOKEN), path, kind, host="10.0.0.5:8470")[0]
    assert first.get("status", first.get("code")) in (403, 1008)


def test_the_token_moves_into_a_cookie() -> None:
    start, _ = ask(Guard(page, TOKEN), f"/?run=a&token={TOKEN}", host="10.0.0.5:8470")
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    assert (start["status"], headers["location"]) == (303, "/?run=a")
    assert {"HttpOnly", "SameSite=Strict"} <= set(headers["set-cookie"].split("; "))
    cookie = headers["set-cookie"].split(";")[0]
    for kind in ("http", "websocket"):
        assert ask(Guard(page, TOKEN), "/", kind, host="10.0.0.5:8470", cookie=cookie) == PASSED
    assert ask(Guard(page, TOKEN), "/", host="10.0.0.5:8470", cookie="semidfl-token=other")[0]["status"] == 403


def test_loopback_addresses() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "127.8.9.1", "localhost", "::1")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "127.example.org")] == [False] * 4
    assert ask(Guard(page, ""), "/", host="127.0.0.2:8470") == PASSED
