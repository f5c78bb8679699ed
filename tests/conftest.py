"""Settings for all tests."""

from __future__ import annotations

import signal

from hypothesis import settings

# No deadline: on a machine that others use too, a slow example says nothing.
settings.register_profile("speechdp", deadline=None)
settings.load_profile("speechdp")

# A shell that starts the tests in the background has them ignore SIGINT, and what tests start would ignore it, too.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
