"""A batch and where it is."""

from __future__ import annotations

import torch

from speechdp.data.loading.batch import Batch


def test_a_batch_that_is_there_already_is_not_copied() -> None:
    batch = Batch(torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.int64), torch.tensor([2]), 2)
    assert batch.to(torch.device("cpu")) is batch
