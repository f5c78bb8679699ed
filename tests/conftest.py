"""Settings for all tests."""

from __future__ import annotations

import signal

from hypothesis import settings

# No deadline: on a machine that others use too, a slow example says nothing.
settings.register_profile("speechdp", deadline=None)
settings.load_profile("speechdp")

# In the background of a shell tests would ignore SIGINT, and so would what they start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
