"""What the probe's ranks find out together: shared folder, clocks, speed, Horovod."""

from __future__ import annotations

import contextlib
import errno
import itertools
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from speechdp.comm.base import Communicator, ReduceOp
from speechdp.comm.startup.create import choose_backend, create_communicator
from speechdp.comm.startup.world import check_sum
from speechdp.doctor.links import slow_links
from speechdp.files import disk_reason, remedy_of

#: Longest wait for another rank's file, s: a network disk may show a new file late.
_VISIBLE_WITHIN_S = 3.0
#: Errors of a folder that does not exist, or that this user may not access.
_NO_PLACE = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM)
_CLOCK_ROUNDS = 7
_LATENCY_ROUNDS = 20
_SPEED_ROUNDS = 3
#: Approximate longest time for measuring one link, however slow it is, s.
_SPEED_S = 3.0
_MIB = 1 << 20


def folder_facts(comm: Communicator, folder: Path, prefix: str, token: str) -> dict[str, Any]:
    """Write one file per rank, and check that the others' files can be read.  Collective.

    Args:
        prefix: prefix of the files' names.
        token: content of the files.

    Returns:
        "error": why this rank cannot write, or ""; "remedy": what helps if the disk accepts no data, or "";
        "unseen": ranks whose file this one does not see (rank 0 looks for those of all ranks, the others for
        rank 0's); "free_bytes": free space, -1 if unknown.
    """
    own = folder / f"{prefix}{comm.rank}"
    error, remedy, is_made = "", "", False
    try:
        with own.open("x", encoding="utf-8") as file:
            is_made = True
            file.write(token)
    except OSError as problem:
        error = disk_reason(problem)
        remedy = "" if problem.errno in _NO_PLACE else remedy_of(problem)
    try:
        written = [not theirs for theirs in comm.allgather_object(error)]
        wanted = range(comm.size) if comm.rank == 0 else range(1)
        paths = {rank: folder / f"{prefix}{rank}" for rank in wanted if written[rank]}
        unseen = _unseen(paths, token)
        comm.barrier()
    finally:
        if is_made:
            with contextlib.suppress(OSError):  # it says nothing that the checks have not found
                own.unlink()
    return {"error": error, "remedy": remedy, "unseen": unseen, "free_bytes": _free_bytes(folder)}


def clock_facts(comm: Communicator) -> dict[str, Any]:
    """Read this rank's clock around some exchanges that no rank leaves before all have joined.  Collective.

    The readings of two ranks bound the difference between their clocks (judge_network.clock_offset).
    """
    before, after = [], []
    for _ in range(_CLOCK_ROUNDS):
        before.append(time.time())
        comm.barrier()
        after.append(time.time())
    return {"before": before, "after": after}


def speed_facts(comm: Communicator, num_bytes: int, name: str) -> dict[str, Any]:
    """Time small and large allreduces over the ranks of `comm`.  Collective.

    Args:
        num_bytes: size of the large one, bytes; reduced if the link is very slow.
        name: prefix of the exchanges' names.

    Returns:
        "latency_s": median time for 8 bytes, s; "bus_bytes_s": 2 (N-1)/N bytes / time, the rate at which
        every link must work for this, the best of several, bytes/s; "bytes": size of the large allreduce.
        {} for a single rank.
    """
    if comm.size == 1:
        return {}
    small = torch.zeros(1, dtype=torch.float64)
    latencies = sorted(_seconds(comm, small, f"{name}.small") for _ in range(_LATENCY_ROUNDS))
    trial_s = _seconds(comm, torch.zeros(_MIB // 4), f"{name}.trial")
    wanted = min(num_bytes, _MIB * max(1, int(_SPEED_S / trial_s)))
    large = torch.zeros(max(1, wanted // 4))
    times: list[float] = []
    # Every rank sees the same times, so all stop together.
    while len(times) < _SPEED_ROUNDS and sum(times) < _SPEED_S:
        times.append(_seconds(comm, large, f"{name}.large"))
    bus_bytes = 2 * (comm.size - 1) / comm.size * large.nbytes
    return {
        "latency_s": latencies[len(latencies) // 2],
        "bus_bytes_s": bus_bytes / min(times),
        "bytes": large.nbytes,
    }


def pair_facts(
    comm: Communicator, pair: tuple[int, int], num_bytes: int, rates: dict[tuple[int, int], float]
) -> dict[str, Any]:
    """Time allreduces between two ranks while the others wait.  Collective over all.

    Args:
        pair: the two ranks.
        num_bytes: as for `speed_facts`.
        rates: best rate of each pair so far, bytes/s; updated in the same way on every rank.

    Returns:
        As `speed_facts`, with the pair's best rate so far.
    """
    part = comm.split(int(comm.rank in pair))
    measured = speed_facts(part, num_bytes, "speechdp.pair") if comm.rank in pair else {}
    part.close()
    facts = dict(comm.allgather_object(measured)[pair[0]])
    rates[pair] = facts["bus_bytes_s"] = max(rates.get(pair, 0.0), facts["bus_bytes_s"])
    return facts


def slow_pairs(rates: dict[tuple[int, int], float]) -> list[tuple[int, int]]:
    """Return the pairs that are slow compared with the others."""
    return list(slow_links(rates)[0])


def horovod_facts(comm: Communicator, num_bytes: int) -> dict[str, Any]:
    """Start Horovod as training would, check its world, and time it.  Collective.

    Returns:
        "skipped": why it was not started; otherwise "rank", "size", "controller" and what `speed_facts`
        returns.
    """
    choice = choose_backend()
    if {str(name) for name in comm.allgather_object(choice.name)} != {"horovod"}:
        return {"skipped": choice.notice or "another rank has no Horovod"}
    hvd = create_communicator("horovod")
    check_sum(hvd)
    speed = speed_facts(hvd, num_bytes, "speechdp.horovod")
    controller = str(getattr(hvd, "controller", ""))
    hvd.close()
    return {"rank": hvd.rank, "size": hvd.size, "controller": controller, **speed}


def neighbours(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Return the pairs of first ranks of neighbouring hosts; with 3 hosts or more, also last and first.

    Args:
        hosts: host of each rank.
    """
    first = [hosts.index(host) for host in dict.fromkeys(hosts)]
    pairs = list(itertools.pairwise(first))
    return [*pairs, (first[-1], first[0])] if len(first) > 2 else pairs


def _seconds(comm: Communicator, x: torch.Tensor, name: str) -> float:
    """Return the time of one allreduce on the slowest rank; the same number on all ranks."""
    comm.barrier()
    begin = time.perf_counter()
    comm.allreduce(x, name=name)
    took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    return float(comm.allreduce(took, name=f"{name}.time", op=ReduceOp.MAX))


def _unseen(paths: dict[int, Path], token: str) -> list[int]:
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    missing = dict(paths)
    while True:
        missing = {rank: path for rank, path in missing.items() if not _holds(path, token)}
        if not missing or time.monotonic() > deadline:
            return sorted(missing)
        time.sleep(0.1)


def _holds(path: Path, token: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") == token
    except OSError:
        return False


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return -1
