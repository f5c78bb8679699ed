"""Sample the resource use of ranks while a run trains: the first rank of each host samples the others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from speechdp.comm.environment import host_name
from speechdp.process.notices import warn
from speechdp.timing.gpu import gpu_uuid
from speechdp.timing.sampler import Sampler
from speechdp.train.session import Session


@contextmanager
def sampled(session: Session, hz: float, folder: Path, origin_s: float) -> Iterator[Sampler | None]:
    """Record in FOLDER/samples-HOST.jsonl what ranks use during the block.  Collective at its start.

    Yields this host's sampler on the rank that samples, None on others.

    If a host could not be recorded, its sampling rank prints why at the end, even if the block fails.  That
    is not left to rank 0, because ranks that have failed must not wait for one another.

    Args:
        session: the ranks.
        hz: samples per second; 0: no samples, and no exchange.
        folder: folder for the samples.
        origin_s: the `time.perf_counter` time from which the samples' times count.
    """
    if hz == 0:
        yield None
        return
    comm, host = session.comm, host_name()
    mine = {"host": host, "pid": os.getpid(), "gpu": gpu_uuid(session.device)}
    everyone = dict(enumerate(comm.allgather_object(mine)))
    here = {rank: it for rank, it in everyone.items() if it["host"] == host}
    if min(here) != comm.rank:
        yield None
        return
    sampler = Sampler(
        folder / f"samples-{host}.jsonl",
        {rank: it["pid"] for rank, it in here.items()},
        hz=hz,
        origin_s=origin_s,
        gpu_of_rank={rank: it["gpu"] for rank, it in here.items() if it["gpu"] is not None},
        # Containers on one machine have separate host names, but may share a GPU.
        unobserved_gpus={
            it["gpu"] for it in everyone.values() if it["host"] != host and it["gpu"] is not None
        },
    )
    try:
        with sampler:
            yield sampler
    finally:
        if sampler.problem is not None:
            _report_problem(session, sampler.problem)


def _report_problem(session: Session, problem: str) -> None:
    """Show one line: by the reporter on rank 0, where alone it is not silent, else as a warning."""
    if session.comm.rank == 0:
        session.reporter.notice(problem)
        return
    warn(f"rank {session.comm.rank}: {problem}")
