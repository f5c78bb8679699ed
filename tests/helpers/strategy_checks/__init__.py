"""Identities that every strategy must satisfy (float64, 1e-9), as checks that run on any communicator.

Every check is collective: all ranks call it with their communicator, on threads or under mpirun.  Each module
here has a tuple CHECKS; NEEDS_PEERS = True in a module says that its checks need messages between two ranks.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

from speechdp.comm.base import Communicator

Check = Callable[[Communicator], None]


def _collect(*, with_peers: bool) -> tuple[Check, ...]:
    modules = [
        importlib.import_module(f"{__name__}.{m.name}")
        for m in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name)
    ]
    return tuple(
        check
        for module in modules
        if getattr(module, "NEEDS_PEERS", False) is with_peers
        for check in module.CHECKS
    )


#: Checks that collectives alone can carry.
CHECKS = _collect(with_peers=False)
#: Checks that need messages between two ranks besides.
PEER_CHECKS = _collect(with_peers=True)
