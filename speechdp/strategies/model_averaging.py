"""K-step averaging: every rank trains by itself and the parameters are averaged once a period."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from speechdp.strategies.periodic import PeriodicStrategy
from speechdp.timing.timeline import Span


@dataclass(eq=False)
class ModelAveraging(PeriodicStrategy):
    """Average parameters over all ranks once a period.

    Update rule: K times w_i <- w_i - lr * g_i(w_i) on every rank i, with g_i the mean gradient of its own
    frames; then w_i <- (sum_j n_j w_j) / (sum_j n_j), n_j the frames rank j has seen since the last
    average.  With K = 1 and plain SGD this is gradient averaging.

    Exchange: the flat parameters and the weight behind them in one allreduce; 2 (N-1)/N times the
    parameters' bytes sent by a rank and period (twice with momentum=average).

    Guarantee: replicas are bitwise equal after each average, and after finish.

    Source: K-AVG, Zhou & Cong 2018 (arXiv 1708.01012, algorithm 1); Kaldi's nnet3 averaging per iteration.
    Deviations: weights by frames (kaldi-aslp does the same) instead of equal ones; momentum is an option.
    """

    #: What becomes of the optimizer's state at an average: each rank's own, their mean, or zero.
    momentum: Literal["keep", "average", "reset"] = "keep"

    def exchange(self) -> None:
        with self.timeline.span(Span.COMM):
            self.average_parameters()
            if self.momentum == "average":
                for name, tensor in self._optimizer_vectors():
                    self.average_tensor(torch.cat([tensor, tensor.new_zeros(1)]), name, result=tensor)
            elif self.momentum == "reset":
                self.replica.reset_optimizer()

    def _optimizer_vectors(self) -> list[tuple[str, Tensor]]:
        return [(n, t) for n, t in self.replica.optimizer_tensors().items() if t.dim() == 1]
