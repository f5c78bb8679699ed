"""Which jobs are given back to the batch system: those that it stopped itself."""

from __future__ import annotations

import signal

import pytest

from speechdp.exit_codes import FAILED, STOPPED
from speechdp.launching.requeue import is_to_go_on
from speechdp.launching.supervise import JobEnd


@pytest.mark.parametrize(
    ("stop_signal", "exit_code", "expected"),
    [
        (signal.SIGUSR1, STOPPED, True),
        (signal.SIGUSR2, STOPPED, True),
        (signal.SIGUSR1, 128 + signal.SIGUSR1, True),  # before the ranks could answer: nothing is lost
        (None, STOPPED, True),  # the ranks were told directly
        (signal.SIGTERM, STOPPED, False),  # scancel: it must not come back
        (signal.SIGTERM, 128 + signal.SIGTERM, False),
        (signal.SIGINT, STOPPED, False),
        (None, FAILED, False),
        (None, 0, False),
        (signal.SIGUSR1, 0, False),  # it was complete by then
    ],
)
def test_what_goes_on(stop_signal: signal.Signals | None, exit_code: int, expected: bool) -> None:
    assert is_to_go_on(JobEnd(exit_code, stop_signal), exit_code) == expected
