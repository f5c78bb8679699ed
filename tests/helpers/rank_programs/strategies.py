"""One rank of a job that runs every strategy identity: `strategies.py BACKEND SIZE [collectives]`.

`collectives` leaves out those that need messages between two ranks.
"""

from __future__ import annotations

import sys

from speechdp.comm.base import Communicator
from speechdp.comm.startup.create import create_communicator
from speechdp.comm.startup.failure import guard
from tests.helpers.strategy_checks import CHECKS, PEER_CHECKS


def main(comm: Communicator) -> None:
    assert comm.backend == sys.argv[1]
    assert comm.size == int(sys.argv[2])
    checks = CHECKS if "collectives" in sys.argv[3:] else CHECKS + PEER_CHECKS
    for check in checks:
        try:
            check(comm)
        except AssertionError as error:
            raise AssertionError(f"{check.__name__}: {error}") from error
    if comm.rank == 0:
        print(f"{len(checks)} identities hold on {comm.size} ranks")


sys.exit(guard(lambda: create_communicator(sys.argv[1]), main))
