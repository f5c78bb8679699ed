"""Settings for all tests."""

from __future__ import annotations

from hypothesis import settings

# No deadline: on a machine that others use too, a slow example says nothing.
settings.register_profile("speechdp", deadline=None)
settings.load_profile("speechdp")
