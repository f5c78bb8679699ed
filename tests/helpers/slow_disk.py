"""Disks that take longer than a run that fails waits for its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from speechdp.checkpoint import writer as checkpoint_writer
from tests.helpers.waiting import LIMIT_S


@contextmanager
def checkpoints_completed() -> Iterator[None]:
    """Let runs that fail in the block complete the checkpoint under way, however slow the disk is.

    They wait two seconds for it otherwise: on a busy machine a sync may take longer.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_writer, "_GRACE_S", LIMIT_S)
        yield
