"""Compute epoch plans ahead of time, in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from speechdp.data.plan.epoch_plan import EpochPlan


class Planner:
    """Returns the plan of an epoch, and computes the next epoch's plan in a thread.

    The plan of a large corpus takes seconds to compute; so nobody waits for it at the end of an epoch.  Two
    plans are kept.  Thread-safe.

    Args:
        make: computes the plan of an epoch; pure.
        num_epochs: epochs of the run; later ones are not planned ahead.
    """

    def __init__(self, make: Callable[[int], EpochPlan], num_epochs: int) -> None:
        self._make, self._num_epochs = make, num_epochs
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="speechdp-planner")
        self._plans: dict[int, Future[EpochPlan]] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def __call__(self, epoch: int) -> EpochPlan:
        """Return the plan of an epoch.  Raises the error that occurred in making it."""
        with self._lock:
            if self._is_closed:
                return self._make(epoch)
            for wanted in (epoch, epoch + 1):
                if wanted not in self._plans and (wanted < self._num_epochs or wanted == epoch):
                    self._plans[wanted] = self._thread.submit(self._make, wanted)
            for past in [e for e in self._plans if not epoch <= e <= epoch + 1]:
                del self._plans[past]
            plan = self._plans[epoch]
        return plan.result()

    def close(self) -> None:
        """Join the thread; safe to call twice.  Later calls compute their plan in the caller's thread."""
        with self._lock:
            self._is_closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)
