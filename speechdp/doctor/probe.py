"""What every rank of the doctor's job runs: `python -m speechdp.doctor.probe OPTIONS` (JSON).

Each part has a time limit after which the rank ends itself, so nothing is left on a node, even if the network
to it is down.  Libraries are imported only where they are needed, so that a rank first reports its start.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speechdp import remedies
from speechdp.comm import environment
from speechdp.doctor.wire import ALL, Report, ReportWriter

if TYPE_CHECKING:
    from speechdp.comm.base import Communicator

#: Prefix of the probe's hidden files, whose names nothing else uses: this, the token, a dash, the rank.
TOKEN_PREFIX = ".speechdp-doctor-"
#: Times a link that looks slow is measured again.
_SECOND_LOOKS = 2
#: Time limit for reading a whole data directory, s.
_VERIFY_LIMIT_S = 24 * 3600.0


@dataclass(frozen=True)
class ProbeOptions:
    """What the probe has to check.

    Attributes:
        data: data directory; "": none.
        folder: folder that a run is to be written to; "": none.
        token: a unique word of this job, for names of files.
        verify: whether to read every utterance.
        num_bytes: size of the allreduce that is timed, bytes.
        limit_s: time limit of each part, s.
        hosts: host of each rank, as requested from the launcher; (): its choice.
    """

    data: str
    folder: str
    token: str
    verify: bool
    num_bytes: int
    limit_s: float
    hosts: tuple[str, ...]

    def to_json(self) -> str:
        """Return the argument of the probe."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ProbeOptions:
        """Read the argument of the probe."""
        values = json.loads(text)
        return cls(**{**values, "hosts": tuple(values["hosts"])})


class Probe:
    """The parts of the probe on one rank; each part reports its results at its end."""

    def __init__(self, options: ProbeOptions, launch: environment.Launch | None) -> None:
        self._options = options
        self._launch = launch
        self._writer = ReportWriter(0 if launch is None else launch.rank)
        self._facts: dict[str, dict[str, Any]] = {}

    def run(self) -> int:
        """Check this node, then join the others; return the exit code."""
        with self._part("node") as found:
            from speechdp.doctor.facts import data_facts, node_facts  # noqa: PLC0415

            found.update(node_facts())
        if self._options.data:
            limit_s = _VERIFY_LIMIT_S if self._options.verify else self._options.limit_s
            with self._part("data", limit_s) as found:
                found.update(data_facts(Path(self._options.data), verify=self._options.verify))
        from speechdp.comm.startup.failure import guard  # noqa: PLC0415

        return guard(self._connect, self._together)

    def _connect(self) -> Communicator:
        """Initialise the library over which the launcher connects the ranks."""
        from speechdp.comm.startup.create import create_communicator  # noqa: PLC0415

        with self._part("connect") as found:
            alone = self._launch is None
            gloo = environment.started_by_horovodrun()
            comm = create_communicator("serial" if alone else "horovod" if gloo else "mpi")
            found.update({"backend": comm.backend, "rank": comm.rank, "size": comm.size})
            found["launcher"] = [] if self._launch is None else [self._launch.rank, self._launch.size]
            found.update(_mpi_facts())
        return comm

    def _together(self, comm: Communicator) -> int:
        if self._launch is not None and (self._launch.rank, self._launch.size) != (comm.rank, comm.size):
            return 0  # no common world for further checks; the facts of `connect` say so
        from speechdp.doctor import exchange  # noqa: PLC0415

        options = self._options
        if options.folder:
            with self._part("folder") as found:
                prefix = f"{TOKEN_PREFIX}{options.token}-"
                found.update(exchange.folder_facts(comm, Path(options.folder), prefix, options.token))
        with self._part("clock") as found:
            found.update(exchange.clock_facts(comm))
        with self._part("speed") as found:
            found.update(exchange.speed_facts(comm, options.num_bytes, "speechdp.doctor"))
        if comm.backend == "mpi" and comm.size > 1:
            self._pairs(comm)
            self._horovod(comm)
        for rank, facts in enumerate(comm.allgather_object(self._facts)):
            if comm.rank == 0:
                self._writer.write(Report(rank, ALL, is_end=True, facts=facts))
        return 0

    def _pairs(self, comm: Communicator) -> None:
        from speechdp.doctor import exchange  # noqa: PLC0415

        hosts = comm.allgather_object(environment.host_name())
        if len(self._options.hosts) == comm.size:
            hosts = list(self._options.hosts)  # nodes may all have one name
        pairs = exchange.neighbours(hosts)
        rates: dict[tuple[int, int], float] = {}
        for _ in range(1 + _SECOND_LOOKS):
            for pair in pairs:
                with self._part(f"pair {pair[0]} {pair[1]}") as found:
                    found.update(exchange.pair_facts(comm, pair, self._options.num_bytes, rates))
            # Something else may have kept a host busy, so slow links are measured again.
            pairs = exchange.slow_pairs(rates)

    def _horovod(self, comm: Communicator) -> None:
        from speechdp.doctor import exchange  # noqa: PLC0415

        names = set(comm.allgather_object(environment.host_name()))
        with self._part("horovod") as found:
            if len(names) < len(set(self._options.hosts)):
                found["skipped"] = "several hosts have one name"  # Horovod would crash or hang
                return
            found.update(exchange.horovod_facts(comm, self._options.num_bytes))

    @contextmanager
    def _part(self, phase: str, limit_s: float | None = None) -> Iterator[dict[str, Any]]:
        limit_s = self._options.limit_s if limit_s is None else limit_s
        rank = self._writer.rank
        self._writer.write(Report(rank, phase, is_end=False, limit_s=limit_s))
        found: dict[str, Any] = {}
        # By a C thread, since MPI_Init holds the GIL; the doctor knows which part was running.
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
            faulthandler.dump_traceback_later(limit_s, exit=True, file=nowhere)
            try:
                yield found
            finally:
                faulthandler.cancel_dump_traceback_later()
        self._facts[phase] = found
        self._writer.write(Report(rank, phase, is_end=True, limit_s=self._options.limit_s, facts=found))


def _mpi_facts() -> Mapping[str, Any]:
    from speechdp.comm.startup.world import library_version  # noqa: PLC0415

    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized():
        return {}
    return {
        "mpi": [mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()],
        "mpi_threads": int(mpi.Query_thread()),
        "mpi_threads_needed": int(mpi.THREAD_MULTIPLE),
        "mpi_library": library_version(mpi),
    }


def main() -> None:
    """Run the probe and exit with its exit code."""
    options = ProbeOptions.from_json(sys.argv[1])
    with remedies.of_command(()):
        sys.exit(Probe(options, environment.announced()).run())


if __name__ == "__main__":
    main()
