"""Signals: the first asks, the second breaks, and who runs many things hears of it."""

import os
import signal

import pytest

from semidfl.stop import Stop


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_signal_asks_and_the_second_breaks() -> None:
    with Stop() as stop:
        press()
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            press()


def test_the_outer_stop_hears_of_a_signal_inside() -> None:
    with Stop() as outer:
        with Stop() as inner:
            press()
        assert inner.requested
        assert outer.requested
        with Stop() as next_one:
            assert next_one.requested  # asked before it began, it ends after its first round


def test_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Stop() as stop:
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert not stop.requested
