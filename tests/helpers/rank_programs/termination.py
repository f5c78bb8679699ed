"""One rank of a job that starts and ends asynchronous training often: `termination.py BACKEND ROUNDS`.

With `fails` instead of a number the exchange of rank 1 breaks down in the first round.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

from speechdp.comm.base import Communicator
from speechdp.comm.startup.create import create_communicator
from speechdp.comm.startup.failure import guard
from tests.helpers.strategy_checks.ad_psgd import Descent


def main(comm: Communicator) -> None:
    if sys.argv[2] == "fails":
        fail(comm)
        return
    num_rounds = int(sys.argv[2])
    run = Descent(comm, learning_rate=0.1)
    run.strategy.pause()
    chance = random.Random(comm.rank)
    begun_s = time.monotonic()
    for _ in range(num_rounds):
        # Nothing but the strategy's own messages keeps ranks in step from round to round.
        run.strategy.resume()
        for _ in range(chance.randrange(5)):
            run.descend(1, pause_s=chance.choice((0.0, 0.0, 0.002)))
        run.strategy.pause()
    statistics = run.strategy.statistics()
    run.finish()
    assert statistics["exchanges"] > 0
    if comm.rank == 0:
        print(f"{num_rounds} rounds in {time.monotonic() - begun_s:.1f} s, {statistics}")


def fail(comm: Communicator) -> None:
    run = Descent(comm)
    if comm.rank == 1:

        def send(*_: Any, **__: Any) -> None:
            raise OSError("the cable is gone")

        run.strategy.peers.send = send  # type: ignore[method-assign]
    while True:
        run.descend(1)
        time.sleep(0.01)


sys.exit(guard(lambda: create_communicator(sys.argv[1]), main))
