"""Gather every rank's timing into timing.json."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from speechdp import remedies
from speechdp.comm.base import Communicator, ReduceOp
from speechdp.errors import RunError
from speechdp.files import cannot_be_written, write_text_atomically
from speechdp.timing.timeline import Timeline


def gather_timing(
    timeline: Timeline,
    comm: Communicator,
    others: dict[str, Any] | None = None,
    *,
    of_ranks: Mapping[int, Mapping[str, Any]] | None = None,
    synchronous: bool = True,
) -> dict[str, Any] | None:
    """Gather every rank's sums and further entries (`others`).  Collective.

    In each step, the rank that arrives last at an exchange does not wait.  So the shortest communication of
    all ranks is the exchange itself, and the excess of the others is waiting.  Summed over steps, this also
    shows ranks that are late in turn (batches of unequal length), which a single rank's sum does not.

    Args:
        timeline: timeline of this rank.
        others: further entries of this rank.
        of_ranks: further entries that this rank knows about other ranks, such as those on its host, by rank.
        synchronous: whether ranks take their steps together.  Otherwise steps of different ranks do not
            correspond.

    Returns:
        The content of timing.json on rank 0, None on the others.
    """
    entry = {"host": socket.gethostname(), **timeline.summary(), **(others or {})}
    known = [[rank, dict(more)] for rank, more in (of_ranks or {}).items()]
    ranks = comm.allgather_object({**entry, "of_ranks": known})
    more_of = {rank: more for one in ranks for rank, more in one.pop("of_ranks")}
    ranks = [{**one, **more_of.get(one["rank"], {})} for one in ranks]
    exchange_s = None
    if synchronous and len({other["steps"] for other in ranks}) == 1:
        shortest = torch.tensor(timeline.comm_of_steps(), dtype=torch.float64)
        comm.allreduce(shortest, name="shortest_comm", op=ReduceOp.MIN)
        exchange_s = shortest.sum().item()
    if comm.rank != 0:
        return None
    warmup_steps = min(entry["warmup_steps"] for entry in ranks)
    timing = {"warmup_steps": warmup_steps, "exchange_s": exchange_s, "ranks": ranks}
    lost = sorted(set(range(comm.size)) - set(comm.alive))
    return {**timing, "lost_ranks": lost} if lost else timing


def has_timed_steps(timing: dict[str, Any]) -> bool:
    """Return whether timing.json contains steps that trained on data.

    Asynchronous ranks that only meet after the last batch of the run have an entry without frames.
    """
    ranks = timing["ranks"]
    return all(entry["steps"] > 0 for entry in ranks) and any(entry["frames"] > 0 for entry in ranks)


def write_timing(run_dir: Path, timing: dict[str, Any]) -> Path:
    """Write timing.json atomically: a reader sees the old file or the new one.

    Raises:
        RunError: the folder cannot be written.
    """
    path = run_dir / "timing.json"
    try:
        write_text_atomically(path, json.dumps(timing, indent=1))
    except OSError as error:
        raise RunError(cannot_be_written(path, error, remedies.resuming())) from error
    return path
