"""Sample the load of this host's ranks and GPUs several times per second, in a background thread.

The lines are described in docs/timing.md; `samples.py` reads them.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from speechdp.comm.environment import host_name
from speechdp.errors import RunError
from speechdp.jsonl import LineFile
from speechdp.timing.gpu import GpuReader, GpuTally, visible_gpus

#: Longest wait for the thread at the end, s: a driver that does not answer must not hold up the run.
_JOIN_S = 10.0
#: Interval of queries for a GPU's other users, s: they change more slowly than the load.
_OTHERS_S = 1.0
#: Lines after which the sampling rate is halved: a file of weeks stays as small as one of hours.
_LINES_AT_ONE_RATE = 100_000


class Sampler:
    """Sample the processes and GPUs of one host during its block; one rank of each host has one.

    It never ends the run.  Values that cannot be read are left out of the lines and named once in the file.
    If the file cannot be written, sampling ends, and `problem` says so.  To limit the file's size, the
    sampling rate is halved after each _LINES_AT_ONE_RATE lines.

    Attributes:
        problem: why recording stopped, in one line; None: it did not.
    """

    def __init__(
        self,
        path: Path,
        ranks: Mapping[int, int],
        *,
        hz: float = 10.0,
        gpus: bool = True,
        origin_s: float | None = None,
        gpu_of_rank: Mapping[int, str] | None = None,
        unobserved_gpus: Collection[str] = (),
    ) -> None:
        """Store the settings; nothing is opened before the block starts.

        Args:
            path: JSONL file to append to.
            ranks: process id of each rank on this host.
            hz: initial number of samples per second, above 0.
            gpus: whether to sample GPUs, if there are any.
            origin_s: time by `time.perf_counter` that `t_s` counts from; None: the start of the block.
            gpu_of_rank: UUID of each rank's GPU, as `gpu_uuid` returns it; only these are sampled.  None: all
                that CUDA_VISIBLE_DEVICES shows this process.
            unobserved_gpus: UUIDs of GPUs that the job also uses from other containers, with processes that
                cannot be identified here; their other users are not queried.
        """
        assert hz > 0, hz
        self.problem: str | None = None
        self._path = path
        self._pids = dict(sorted(ranks.items()))
        self._interval_s = 1 / hz
        self._hz = hz
        self._wants_gpus = gpus
        self._origin_s = origin_s
        self._gpu_of_rank = gpu_of_rank
        self._processes: dict[int, psutil.Process] = {}
        self._noticed: set[str] = set()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._gpus: GpuReader | None = None
        self._others_due_s = 0.0
        self._unobserved_gpus = frozenset(unobserved_gpus)
        self._tallies: dict[str, GpuTally] = {}
        self._tallies_lock = threading.Lock()  # the sampling thread adds, another thread reads
        self._file: LineFile | None = None
        self._num_lines = 0  # at the current rate

    def __enter__(self) -> Sampler:
        if self._origin_s is None:
            self._origin_s = time.perf_counter()
        try:
            self._file = LineFile(self._path)
        except RunError as error:
            self._give_up(error)
            return self
        self._thread = threading.Thread(target=self._run, name="speechdp-sampler", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            if self._thread.is_alive() and self.problem is None:
                self.problem = (
                    f"{self._path}: the sampler did not stop (driver not responding?); training continues"
                )
            self._thread = None

    def gpu_summaries(self) -> dict[int, dict[str, Any]]:
        """Return the readings of each rank's GPU so far, as `GpuTally.summary` has them.  For any thread."""
        with self._tallies_lock:
            found = {uuid: tally.summary() for uuid, tally in self._tallies.items()}
        return {rank: found[uuid] for rank, uuid in (self._gpu_of_rank or {}).items() if uuid in found}

    def _run(self) -> None:
        """Sample until the block ends or the file cannot be written; the thread owns file and readers."""
        assert self._file is not None
        try:
            self._begin()
            due_s = time.perf_counter() + self._interval_s
            while not self._end.wait(max(0.0, due_s - time.perf_counter())):
                self._sample()
                if self._num_lines >= _LINES_AT_ONE_RATE:
                    self._interval_s, self._num_lines = 2 * self._interval_s, 0
                # Missed samples are not made up for: CPU time counts in hundredths of a second, too coarse
                # for samples in quick succession.
                due_s = max(due_s + self._interval_s, time.perf_counter() + self._interval_s / 2)
        except (RunError, OSError) as error:  # psutil passes on OSErrors it does not know
            self._give_up(error)
        finally:
            for finish in (self._finish_gpus, self._file.close):
                try:
                    finish()
                except RunError as error:
                    self._give_up(error)

    def _begin(self) -> None:
        """Open processes and GPUs and write the head line."""
        problems = [problem for rank, pid in self._pids.items() if (problem := self._open(rank, pid))]
        if self._wants_gpus:
            self._gpus = GpuReader(self._gpus_to_sample())
        names = [] if self._gpus is None else self._gpus.names
        index = {} if self._gpus is None else {uuid: i for i, uuid in enumerate(self._gpus.uuids)}
        numbers = [] if self._gpus is None else self._gpus.numbers
        with self._tallies_lock:
            self._tallies = {uuid: GpuTally(numbers[i]) for uuid, i in index.items()}
        used = {rank: index[uuid] for rank, uuid in (self._gpu_of_rank or {}).items() if uuid in index}
        head = {
            "kind": "gpu" if names else "cpu",
            "hz": self._hz,
            "host": host_name(),
            "ranks": self._pids,
            "gpus": names,
            "gpu_numbers": numbers,
            "gpu_of_rank": used,
            "cores": psutil.cpu_count(),
        }
        self._write(head)
        self._notice(problems)

    def _finish_gpus(self) -> None:
        if self._gpus is not None:
            unanswered = self._gpus.unanswered_queries()
            self._gpus.close()
            self._notice(unanswered)

    def _gpus_to_sample(self) -> list[str]:
        if self._gpu_of_rank is None:
            return visible_gpus()
        return list(dict.fromkeys(uuid for _, uuid in sorted(self._gpu_of_rank.items())))

    def _open(self, rank: int, pid: int) -> str | None:
        try:
            process = psutil.Process(pid)
            process.cpu_percent()  # starts its measurement
        except (psutil.Error, OSError) as error:
            return f"rank {rank}: {error}"
        self._processes[rank] = process
        return None

    def _sample(self) -> None:
        assert self._origin_s is not None
        problems: list[str] = []
        line: dict[str, Any] = {
            "t_s": round(time.perf_counter() - self._origin_s, 3),
            "ranks": self._read_ranks(problems),
        }
        if self._gpus is not None and (rows := self._gpus.read(problems)):
            line["gpus"] = rows
            others = self._read_others(self._gpus, problems)
            if others:
                line["others"] = others
            with self._tallies_lock:
                tallies = list(self._tallies.values())
                for row in rows:
                    tallies[int(row[0] or 0)].add(row)
                for of_others in others:
                    tallies[int(of_others[0] or 0)].add_others(of_others)
        self._write(line)
        self._notice(problems)

    def _read_others(self, gpus: GpuReader, problems: list[str]) -> list[list[int | None]]:
        """Return other processes' use of the ranks' GPUs, if it is due and known."""
        now = time.perf_counter()
        if now < self._others_due_s:
            return []
        self._others_due_s = now + _OTHERS_S
        users: dict[str, list[int]] = {}
        for rank, uuid in (self._gpu_of_rank or {}).items():
            # A rank that has ended, or never started, holds nothing.
            if rank in self._processes and uuid not in self._unobserved_gpus:
                users.setdefault(uuid, []).append(self._pids[rank])
        return gpus.read_others(users, self._pids.values(), problems)

    def _read_ranks(self, problems: list[str]) -> list[tuple[int, float, int]]:
        """Return (rank, CPU in % of all its threads since the last sample, resident bytes)."""
        rows = []
        for rank, process in list(self._processes.items()):
            try:
                cpu_percent, rss_bytes = process.cpu_percent(), process.memory_info().rss
            except psutil.NoSuchProcess:
                del self._processes[rank]  # has ended
            except (psutil.Error, OSError) as error:
                problems.append(f"rank {rank}: {error}")
            else:
                if rss_bytes > 0:  # a zombie process has 0
                    rows.append((rank, round(cpu_percent, 1), rss_bytes))
        return rows

    def _notice(self, problems: list[str]) -> None:
        for problem in problems:
            if problem not in self._noticed:
                self._noticed.add(problem)
                self._write({"notice": problem})

    def _write(self, record: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(record, separators=(",", ":")))
        self._num_lines += 1

    def _give_up(self, error: RunError | OSError) -> None:
        if self.problem is None:
            cause = error.__cause__ if isinstance(error, RunError) else error
            reason = (cause.strerror or str(cause)) if isinstance(cause, OSError) else str(error)
            self.problem = f"{self._path}: utilisation is no longer recorded ({reason}); training continues"
