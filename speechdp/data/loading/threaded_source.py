"""Batches read by several threads at a time: the kernel copies for one while another prepares its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from speechdp.data.loading.loader_threads import keep_to_one_thread
from speechdp.data.loading.source import Pending, SplitSource
from speechdp.data.plan.assignment import PlanPosition
from speechdp.data.plan.epoch_plan import Segments


class ThreadedSource(SplitSource):
    """Starts the batches of another source in threads; for sources whose `start` makes the whole batch.

    Args:
        source: thread-safe; this source closes it.
        num_threads: batches made at a time.
    """

    def __init__(self, source: SplitSource, num_threads: int) -> None:
        self._source = source
        self.index, self.times, self.feature_dim = source.index, source.times, source.feature_dim
        self.left_out = source.left_out
        self.read_ahead = num_threads + 1
        self.times.facts["threads"] = num_threads
        self._threads = ThreadPoolExecutor(
            num_threads, thread_name_prefix="speechdp-read", initializer=keep_to_one_thread
        )

    def start(self, segments: Segments, place: PlanPosition | None = None) -> Pending:
        return self._threads.submit(self._source.batch, segments, place)

    def count_classes(self, num_classes: int, share: int, num_shares: int) -> npt.NDArray[np.int64]:
        self._source.beat = self.beat
        return self._source.count_classes(num_classes, share, num_shares)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._source.close()
