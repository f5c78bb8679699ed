"""Settings for all tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from contextlib import ExitStack

import pytest
from hypothesis import settings

from tests.helpers.fork_server import session_of_forks

# No deadline: on a machine that others use too, a slow example says nothing.
settings.register_profile("speechdp", deadline=None)
settings.load_profile("speechdp")

# In the background of a shell tests would ignore SIGINT, and so would what they start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# In a batch job commands would run their jobs on its hosts; tests of such jobs set these themselves.
for _name in ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "JOB_ID"):
    os.environ.pop(_name, None)

#: Begun last, each would keep one worker busy for minutes when the others have ended.
_LONG_FILES = ("e2e/test_recipes.py", "parallel/test_strategy_backends.py", "faults/test_io_faults.py")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without looking for garbage, which was a third of the CPU time of it, in every worker.

    What imports and collection make stays until the end, so later looks are at what tests make only.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(_LONG_FILES))


#: What commands, run in the process of a test, leave to others than those that were there.
_SIGNALS = (
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGINT,
    signal.SIGALRM,
)


@pytest.fixture(autouse=True)
def _signals_stay() -> Iterator[None]:
    """Leave signals to whom they were left before the test."""
    kept = {number: signal.getsignal(number) for number in _SIGNALS}
    yield
    for number, handler in kept.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


_session = ExitStack()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let the jobs of this session, those of all its workers, be forked."""
    if not hasattr(session.config, "workerinput"):
        _session.enter_context(session_of_forks())


def pytest_sessionfinish() -> None:
    """End what serves them."""
    _session.close()
