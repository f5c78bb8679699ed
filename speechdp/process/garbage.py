"""Look for garbage less often while a command imports.

Importing torch makes 200,000 objects that stay, and Python spends a tenth of that time looking through them
for garbage.  A network may keep its tensors in cycles of references, which only that search frees, so
training and recognition go back to Python's own thresholds.
"""

from __future__ import annotations

import gc

_USUAL = gc.get_threshold()


def collect_garbage_less_often() -> None:
    """Search once 10,000 more objects exist, and older objects at every 20th search (usually 700 and 10)."""
    gc.set_threshold(10_000, 20)


def look_for_garbage_as_usual() -> None:
    """Set the thresholds that Python started with."""
    gc.set_threshold(*_USUAL)
