"""Who may see the page: this machine's own browser by default; over the network, whoever has the token.

On 127.0.0.1 a stranger's web site could still reach the page through the visitor's browser, under a name that it lets
point here. So only names of this machine are answered there, and no request that another site's page has sent.
"""

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

__all__ = ["Guard", "is_loopback"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_COOKIE = "semidfl-token"


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name
        return False


class Guard:
    """Wraps an ASGI application, web sockets included; an empty token is for loopback only."""

    def __init__(self, app: App, token: str = "") -> None:
        self.app = app
        self.token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        query = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))
        if (reason := self._refusal(headers, query)) is not None:
            return await _answer(scope, send, 403, [], reason)
        if self.token and "token" in query and scope["type"] == "http":
            # Out of the address bar, where it could be seen or copied, and into a cookie.
            rest = urlencode({name: value for name, value in query.items() if name != "token"})
            where = scope["path"] + ("?" + rest if rest else "")
            cookie = f"{_COOKIE}={self.token}; HttpOnly; SameSite=Strict; Path=/"
            return await _answer(scope, send, 303, [("location", where), ("set-cookie", cookie)], "")
        await self.app(scope, receive, send)
        return None

    def _refusal(self, headers: dict[str, str], query: dict[str, str]) -> str | None:
        host = headers.get("host", "")
        if _of_another_site(headers, host):
            return "this page answers no other site's requests"
        if not self.token:
            return None if is_loopback(_name(host)) else f"open it as http://127.0.0.1 or localhost, not as {host!r}"
        given = query.get("token") or _cookie(headers.get("cookie", ""))
        if hmac.compare_digest(given.encode(), self.token.encode()):
            return None
        return "open the address that `semidfl watch` printed, with its token"


def _of_another_site(headers: dict[str, str], host: str) -> bool:
    """Sent by a page of somebody else's. A link there that a person follows in a tab is none of these requests."""
    if "origin" in headers and _split(headers["origin"]).netloc != host:
        return True
    followed = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return headers.get("sec-fetch-site") in ("cross-site", "same-site") and not followed  # pictures bring no origin


def _name(host: str) -> str:
    """Without the port, and without the brackets of IPv6."""
    return _split(f"//{host}").hostname or ""


def _split(address: str) -> SplitResult:
    """Its parts; none where it is no address."""
    try:
        return urlsplit(address)
    except ValueError:
        return SplitResult("", "", "", "", "")


def _cookie(header: str) -> str:
    try:
        found = SimpleCookie(header).get(_COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""


async def _answer(scope: Scope, send: Send, status: int, headers: list[tuple[str, str]], text: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": text})
        return
    plain = [("content-type", "text/plain; charset=utf-8"), ("cache-control", "no-store"), *headers]
    head = [(name.encode(), value.encode("latin-1", "replace")) for name, value in plain]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": text.encode()})
