"""One rank of an MPI job that runs schedules of delays: `late_ranks BACKEND NUM SEED FOLDER`.

As schedules.py has it, over a real back-end; ranks are stopped, not killed, and read their data themselves.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from speechdp.comm.base import Communicator
from speechdp.comm.startup.create import create_communicator
from speechdp.comm.startup.failure import guard
from speechdp.data.shards.dataset import Dataset
from tests.faults.late import Lateness, Pace, late
from tests.faults.late_runs import SIZES, Bench, Interruption, Ranks
from tests.faults.schedules import Schedule
from tests.helpers.tiny_data import write_tiny_data


class Processes(Ranks):
    """This process is one of the ranks.

    Args:
        comm: all of them.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def run(self, size: int, work: Callable[[Communicator], None]) -> None:
        work(self._comm)

    def late(self, pace: Pace, folder: Path) -> AbstractContextManager[Lateness]:
        return late(pace, folder, self._comm.rank)


def main(comm: Communicator) -> None:
    """Run the schedules; rank 0 prints what is wrong, and how many there were."""
    num, seed, folder = int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    if comm.rank == 0:
        write_tiny_data(folder / "data", SIZES)
    comm.barrier()
    bench, num_wrong = Bench(folder, Processes(comm), Dataset.open(folder / "data")), 0
    for number in range(seed, seed + num):
        schedule = _fit(Schedule.draw(number), comm)
        if comm.rank == 0:
            print(f"begun: {schedule}", flush=True)  # seen where it hangs
        finished = bench.run(schedule.story, schedule.pace)
        sums = comm.allgather_object(float(finished.parameters[comm.rank].double().abs().sum()))
        if comm.rank == 0:
            wrong = list(finished.differences())
            wrong += ["replicas differ"] if len(set(sums)) > 1 else []
            if wrong:
                num_wrong += 1
                print(f"wrong: {schedule}: {'; '.join(wrong)}", flush=True)
            shutil.rmtree(finished.run_dir)
    if comm.rank == 0:
        print(f"{num} schedules over {comm.backend}, {num_wrong} wrong", flush=True)


def _fit(schedule: Schedule, comm: Communicator) -> Schedule:
    """Return the schedule for this job's ranks."""
    story = schedule.story
    interruption: Interruption = "undisturbed" if story.interruption == "undisturbed" else "stopped"
    strategy = story.strategy.replace("groups=2", f"groups={comm.size}")
    story = dataclasses.replace(
        story,
        strategy=strategy.replace("node_size=2", f"node_size={-(-comm.size // 2)}"),
        size=comm.size,
        interruption=interruption,
        num_feeders=0,
    )
    return dataclasses.replace(schedule, story=story, pace=Pace.draw(schedule.seed, comm.size))


if __name__ == "__main__":
    sys.exit(guard(lambda: create_communicator(sys.argv[1]), main))
