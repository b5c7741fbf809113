"""Coming and going: the barrier at the start, serving on at the end. Every wait ends; the log names who is missing."""

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from semidfl.errors import FederationError
from semidfl.exchange.client import Line, Unreachable
from semidfl.exchange.codec import PROTOCOL, Hello
from semidfl.exchange.plan import Plan
from semidfl.exchange.refuse import Refusal, Refused, Tally
from semidfl.exchange.server import Server, difference
from semidfl.node.retry import pauses

__all__ = ["Greeting"]

_GRACE = 2.0
"""seconds that all neighbours get to answer once the others are under way, before those that have are enough"""
_EVERY = 5.0
"""seconds between two lines of the log that say who is waited for"""


@dataclass(frozen=True)
class Greeting:
    """Lives in the network's thread."""

    plan: Plan
    lines: Mapping[str, Line]
    server: Server
    tally: Tally
    log: logging.Logger
    at: dict[str, int]
    """the round that each neighbour was last seen in"""

    async def barrier(self, least: int, restarted: bool) -> dict[str, str]:
        until = time.monotonic() + self.plan.deadlines.hello
        least, patience = min(least, len(self.lines)), until
        self.server.mailbox.waits = not restarted
        why = dict.fromkeys(self.lines, "not heard of yet")
        tasks = [asyncio.create_task(self._greet(name, until, why)) for name in self.lines]
        said = time.monotonic()
        while why and time.monotonic() < until:
            await asyncio.wait(tasks, timeout=0.2)
            if restarted or self.server.begun:  # whoever trains already is waiting for this peer
                patience = min(patience, time.monotonic() + _GRACE)
            if len(tasks) - len(why) >= max(1, least) and time.monotonic() > patience:
                break
            if len(why) == len(tasks) and all(reason.startswith("disagrees") for reason in why.values()):
                break  # it is this peer's own file that is wrong
            if why and time.monotonic() - said > _EVERY:
                said = time.monotonic()
                self.log.info("waiting for %s", "; ".join(f"{who} ({reason})" for who, reason in why.items()))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.server.mailbox.waits = True
        # What a peer said of itself explains more than that it has left.
        why |= {who: f"disagrees: {text}" for who, text in self.server.disputes.items() if who in why}
        if len(self.lines) - len(why) < least:
            text = "; ".join(f"{who}: {reason}" for who, reason in why.items())
            raise FederationError(
                f"too few neighbours came (deadlines.hello is {self.plan.deadlines.hello:g} s): {text}"
            )
        return why

    async def _greet(self, name: str, until: float, why: dict[str, str]) -> None:
        """Until the neighbour is there and agrees; `why` then no longer names it."""
        for pause in pauses(most=1.0):
            try:
                terms, nonce = dict(self.plan.terms), os.urandom(16)
                mine = Hello(PROTOCOL, self.plan.me, self.plan.agreement, nonce, self.server.mailbox.at, terms)
                theirs = await self.lines[name].hello(mine, max(0.1, min(5.0, until - time.monotonic())))
                if theirs.agreement == self.plan.agreement:
                    self.at[name] = min(theirs.at, self.plan.rounds)
                    del why[name]
                    return
                why[name] = f"disagrees: {difference(self.plan.terms, theirs.terms)}"
                self.tally.note(name, Refused(Refusal.DISAGREES, why[name]))
            except Refused as refused:
                why[name] = f"refused: {refused}"
                self.tally.note(name, refused)
            except Unreachable as error:
                why[name] = str(error)
            await asyncio.sleep(pause)

    async def linger(self) -> set[str]:
        until = time.monotonic() + self.plan.deadlines.linger
        tasks = [asyncio.create_task(self._part(name, until)) for name in self.lines]
        said = time.monotonic()
        while (waiting := set(self.lines) - self.server.gone) and time.monotonic() < until:
            await asyncio.sleep(0.05)
            if time.monotonic() - said > _EVERY:
                said = time.monotonic()
                self.log.info("done; still serving %s", ", ".join(sorted(waiting)))
        # All neighbours are done, or time is up; a last moment for our own goodbyes.
        await asyncio.wait(tasks, timeout=1.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return waiting

    async def _part(self, name: str, until: float) -> None:
        for pause in pauses():
            try:
                await self.lines[name].bye(self.plan.rounds, 2.0)
                return
            except (Refused, Unreachable):
                if time.monotonic() + pause > until or name in self.server.gone:
                    return
                await asyncio.sleep(pause)
