"""Which number formats this CPU computes torch's LSTM in: bfloat16 needs AVX-512, float16 more than that."""

from __future__ import annotations

import pytest
import torch


def computes_lstms_in(dtype: torch.dtype) -> bool:
    """Return whether torch can compute an LSTM in this format here."""
    try:
        with torch.autocast("cpu", dtype=dtype):
            torch.nn.LSTM(4, 4)(torch.zeros(2, 1, 4))[0].float().sum().backward()
    except RuntimeError:
        return False
    return True


needs_bf16_lstm = pytest.mark.skipif(
    not computes_lstms_in(torch.bfloat16), reason="this CPU computes no LSTM in bfloat16"
)
