"""Sample the ranks of each host while a run trains: its first rank there does it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from speechdp.comm.environment import host_name
from speechdp.process.notices import warn
from speechdp.timing.gpu import gpu_uuid
from speechdp.timing.sampler import Sampler
from speechdp.timing.timeline import Timeline
from speechdp.train.session import Session


def sampled(
    session: Session, hz: float, run_dir: Path, timeline: Timeline
) -> AbstractContextManager[Sampler | None]:
    """Note in RUN/timeline/samples-HOST.jsonl what ranks use while the block runs.  Collective at its begin.

    Args:
        session: the ranks.
        hz: samples a second; 0: none, and nothing is exchanged.
        run_dir: the run's folder.
        timeline: of this rank; the samples' times are those of its steps.

    Returns:
        What gives the sampler of this host on the rank that has it, None on others.
    """
    return sampled_into(session, hz, run_dir / "timeline", timeline.origin_s)


@contextmanager
def sampled_into(session: Session, hz: float, folder: Path, origin_s: float) -> Iterator[Sampler | None]:
    """Note in FOLDER/samples-HOST.jsonl what ranks use while the block runs.  Collective at its begin.

    What kept a host from being recorded is told at the end, also of a block that fails, by the rank that
    sampled it: ranks that have failed must not wait for one another.

    Args: as of `sampled`; `origin_s`, by `time.perf_counter`, is what the samples' times count from.
    Returns: as `sampled`.
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
        # Containers on one machine, which have hosts' names of their own, may share a GPU.
        untold_gpus={it["gpu"] for it in everyone.values() if it["host"] != host and it["gpu"] is not None},
    )
    try:
        with sampler:
            yield sampler
    finally:
        if sampler.problem is not None:
            _tell(session, sampler.problem)


def _tell(session: Session, problem: str) -> None:
    """Show one line: only rank 0 has a reporter that is not silent."""
    if session.comm.rank == 0:
        session.reporter.notice(problem)
        return
    warn(f"rank {session.comm.rank}: {problem}")
