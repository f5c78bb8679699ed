"""Which number formats each back-end sums: known without loading its library, which would start MPI."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from speechdp.comm.base import Communicator

_PLAIN = Communicator.reducible

#: By the back-end's name, each one's; tests/contract/test_communicators.py holds the classes to it.
REDUCIBLE: Mapping[str, frozenset[torch.dtype]] = {
    "serial": _PLAIN | {torch.float16, torch.bfloat16},
    "threads": _PLAIN | {torch.float16, torch.bfloat16},
    # float16 and bfloat16 are no MPI types, and handed over as bytes they are summed byte by byte without an
    # error.
    "mpi": _PLAIN,
    # bfloat16 is unknown to Horovod 0.28; float16 was measured right over MPI and Gloo.
    "horovod": _PLAIN | {torch.float16},
    # gloo was measured right for both; bfloat16 is rounded at every hop.
    "torch": _PLAIN | {torch.float16, torch.bfloat16},
}
