"""Signals: the first asks, the second breaks, and who runs many things hears of it."""

import os
import signal
import threading
import time

import pytest
import torch

from semidfl.cohort import each
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


def test_clients_whose_work_has_not_begun_are_left_out_after_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    begun: list[int] = []

    def work(x: torch.Tensor) -> torch.Tensor:
        begun.append(int(x))
        if len(begun) == 2:  # both threads are at it
            threading.Timer(0.2, press).start()
        time.sleep(1)
        return x

    with Stop():
        press()
        with pytest.raises(KeyboardInterrupt):
            each(work, 1, torch.arange(20))
    assert len(begun) <= 4  # and not all 20, which a pool does by itself before it ends
