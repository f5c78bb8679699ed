"""Which dtypes each back-end sums, without loading the back-end's library, which would start MPI."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from speechdp.comm.base import Communicator

_PLAIN = Communicator.reducible

#: Summable dtypes by back-end name; tests/contract/test_communicators.py checks the classes against it.
REDUCIBLE: Mapping[str, frozenset[torch.dtype]] = {
    "serial": _PLAIN | {torch.float16, torch.bfloat16},
    "threads": _PLAIN | {torch.float16, torch.bfloat16},
    # MPI has no float16 or bfloat16; passed as bytes, they would be summed byte by byte without an error.
    "mpi": _PLAIN,
    # Horovod 0.28 does not know bfloat16; tests found its sums of float16 correct over MPI and Gloo.
    "horovod": _PLAIN | {torch.float16},
    # Tests found gloo's sums of both correct; it rounds bfloat16 at every hop.
    "torch": _PLAIN | {torch.float16, torch.bfloat16},
}
