"""What a launcher has printed is shown when it has ended, however busy the machine is."""

from __future__ import annotations

import fcntl
import itertools
import os
import time

import pytest

from speechdp.launching.shown_output import ShownOutput


def test_all_that_a_pipe_holds_at_the_end_is_shown_though_a_stray_process_keeps_it_open(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process may be held up for any time; a pipe of a kernel with large pages takes several reads."""
    reading, writing = os.pipe()
    num_bytes = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 1 << 18)
    os.write(writing, b"x" * num_bytes)
    clock = itertools.count(step=5.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    try:
        ShownOutput(reading, None).finish(lambda: False)
    finally:
        os.close(writing)
    assert len(capfd.readouterr().out) == num_bytes >= 1 << 18
