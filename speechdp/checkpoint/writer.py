"""Checkpoints written during training: each rank's thread writes its own file, rank 0's completes the folder.

A rank's thread writes its file into RUN/checkpoints/.step-00000120.NONCE.tmp/ and then tells of it in an
entry beside it.  Rank 0's waits for the entries of all, writes checkpoint.json, and gives the folder its
name.  The nonce is drawn anew at every start, so what a killed job has left is never mixed in.  Threads
exchange nothing over the communicator: the shared disk is all they need.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from speechdp import remedies
from speechdp.checkpoint.folder import (
    CheckpointPlace,
    Entry,
    bytes_written,
    commit,
    not_saved,
    prune,
    read_entries,
    tell,
)
from speechdp.checkpoint.rank_file import GivenUpError, Snapshot, take_snapshot, write_rank_file
from speechdp.checkpoint.state import RankState, last_checkpoint_note
from speechdp.comm.base import Communicator
from speechdp.comm.environment import host_name
from speechdp.errors import RunError
from speechdp.files import cannot_be_read, disk_reason
from speechdp.watchdog.shared_disk import LOOK_S, Patience, not_shared, why_unseen
from speechdp.watchdog.watchdog import Stillness

#: Seconds that rank 0 waits while no file of the others grows; once one could not write, for them to end.
PATIENCE_S, _AFTER_PROBLEM_S = 600.0, 2.0
#: Seconds a failed run gives the checkpoint under way.
_GRACE_S = 2.0
_LONGEST_PAUSE_S = 0.2
#: Share of its patience after which rank 0 looks again how large the files have become: on a network disk a
#: request a file.
_SIZES_SHARE = 0.1


class CheckpointWriter:
    """Writes a run's checkpoints, at most one at a time, while training goes on.

    Args:
        run_dir: the run's folder, on a disk all hosts share.
        comm: the ranks.
        beat: called while this rank's file is written: slow is not hung.
        patience_s: how long rank 0 waits while nothing comes from the others, s.
    """

    def __init__(
        self,
        run_dir: Path,
        comm: Communicator,
        beat: Callable[[], None] = lambda: None,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._run_dir, self._comm, self._beat = run_dir, comm, beat
        self._patience_s = patience_s
        self._folder = run_dir / "checkpoints"
        self._nonce = ""
        self._hosts: list[str] = []
        self._num_begun = 0
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._is_untold = False
        self._written: list[int] = []
        self._gone_on_from: int | None = None
        self._given_up = threading.Event()

    def open(self) -> None:
        """Agree on a nonce, and see that the ranks share the disk; nothing the second time.  Collective.

        Raises:
            RunError: the folder cannot be written, or a rank does not see it.
        """
        if self._nonce:
            return
        comm = self._comm
        nonce, problem = secrets.token_hex(4), None
        probe = self._folder / f".{nonce}.probe"
        if comm.rank == 0:
            problem = self._prepare(probe)
        nonce, problem = comm.broadcast_object((nonce, problem))
        if problem is None:
            probe = self._folder / f".{nonce}.probe"
            told = comm.allgather_object((host_name(), *self._look_for(probe)))
            self._hosts = [host for host, _, _ in told]
            problem = next(
                (
                    unreadable or not_shared(self._folder, rank, self._hosts, unseen)
                    for rank, (_, unseen, unreadable) in enumerate(told)
                    if unreadable or unseen
                ),
                None,
            )
            if comm.rank == 0:
                with contextlib.suppress(OSError):  # the next start clears it
                    probe.unlink(missing_ok=True)
        if problem is not None:
            raise RunError(problem)
        self._nonce = nonce

    def _prepare(self, probe: Path) -> str | None:
        """Make the folder, clear what killed jobs have left in it, and leave a file for others to see."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for left in (*self._folder.glob(".step-*"), *self._folder.glob(".*.probe")):
                shutil.rmtree(left, ignore_errors=True)
                if not left.is_dir():
                    left.unlink(missing_ok=True)
            probe.touch()
        except OSError as error:
            return not_saved(self._run_dir, error)
        return None

    def _look_for(self, probe: Path) -> tuple[str | None, str | None]:
        """Return why this rank does not see the file, and the line on a folder that cannot be read."""
        try:
            return why_unseen(probe), None
        except OSError as error:
            entry = self._problem(error)
            told = OSError(entry["errno"], entry["problem"])
            return None, cannot_be_read(self._folder, told, remedies.going_on())

    def go_on_from(self, step: int) -> None:
        """Note which checkpoint could be read: it is kept until newer ones take its place."""
        self._gone_on_from = step

    def start(self, step: int, state: RankState) -> Path:
        """Begin to write a checkpoint, after the one before it; return where it will be.  Collective.

        On return the state may change.

        Raises:
            RunError: the one before could not be written.
        """
        self.open()
        self._join()
        self.check()
        name = f"step-{step:08d}"
        # A number too: asynchronous ranks may save twice at a step, and rank 0 may be behind the others.
        self._num_begun += 1
        temporary = self._folder / f".{name}.{self._nonce}-{self._num_begun}.tmp"
        place = CheckpointPlace(step, temporary, self._folder / name)
        self._snapshot = take_snapshot(state, self._snapshot)
        thread = threading.Thread(target=self._work, args=(place,), name="speechdp-checkpoint", daemon=True)
        thread.start()
        self._thread = thread  # not one that the system had no room for: `close` would wait for it in vain
        return place.final

    def check(self) -> None:
        """Raise what has gone wrong in the background on this rank: RunError where the disk is full."""
        if self._failure is not None:
            raise self._failure

    def flush(self) -> None:
        """Wait until what was begun is whole on disk.  Collective.

        Raises:
            RunError: it could not be written; the same on all ranks.
        """
        self._join()
        if self._failure is not None and not isinstance(self._failure, RunError):
            raise self._failure
        if self._failure is not None and self._is_untold:
            raise self._failure  # rank 0 would wait for this rank's entry before it listens
        problem = None if self._failure is None else str(self._failure)
        for other in self._comm.allgather_object(problem):
            if other is not None:
                raise RunError(other)

    def close(self) -> None:
        """Give what is under way some seconds to become whole, then leave it.  Safe to call twice."""
        if self._thread is not None:
            self._thread.join(_GRACE_S)
            self._given_up.set()
            self._thread.join(_GRACE_S)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # --- in the thread ---

    def _work(self, place: CheckpointPlace) -> None:
        try:
            entry = self._write_own(place)
            if self._comm.rank == 0:
                self._complete(place, {0: entry})
            else:
                self._tell(place, entry)
        except GivenUpError:
            return
        except BaseException as error:  # raised again by `check`, in the thread that trains
            self._failure = error

    def _write_own(self, place: CheckpointPlace) -> Entry:
        """Write this rank's file; return its entry, which holds the problem if it cannot be written."""
        rank = self._comm.rank
        path = place.temporary / f"rank-{rank:04d}.safetensors"
        try:
            place.temporary.mkdir(parents=True, exist_ok=True)
            sha256, num_bytes = write_rank_file(path, self._snapshot, self._given_up, self._beat)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)  # its room may be all that the others lack
            return {"file": path.name, **self._problem(error)}
        return {"file": path.name, "sha256": sha256, "bytes": num_bytes}

    def _tell(self, place: CheckpointPlace, entry: Entry) -> None:
        try:
            tell(place, self._comm.rank, entry)
        except OSError as error:
            self._is_untold = True
            if "problem" not in entry:
                entry |= self._problem(error)
        if "problem" in entry:
            raise RunError(not_saved(self._run_dir, OSError(entry["errno"], entry["problem"])))

    def _problem(self, error: OSError) -> Entry:
        return {"problem": f"{disk_reason(error)} on rank {self._comm.rank}", "errno": error.errno or 0}

    def _complete(self, place: CheckpointPlace, entries: dict[int, Entry]) -> None:
        """Wait for all ranks' entries, then give the folder its name; on rank 0."""
        try:
            self._collect(place, entries)
            problems = [entries[rank] for rank in sorted(entries) if "problem" in entries[rank]]
            if problems:
                raise OSError(problems[0]["errno"], problems[0]["problem"])
            commit(place, entries, self._comm.size)
        except OSError as error:
            if len(entries) == self._comm.size:  # else somebody may still be writing
                shutil.rmtree(place.temporary, ignore_errors=True)
            raise RunError(not_saved(self._run_dir, error)) from error
        self._written.append(place.step)
        prune(self._run_dir, self._written, self._gone_on_from)

    def _collect(self, place: CheckpointPlace, entries: dict[int, Entry]) -> None:
        silence, pause_s, num_bytes = Stillness(time.monotonic(), LOOK_S), 0.002, 0
        patience, sizes_due_s = Patience(), time.monotonic()
        while missing := [rank for rank in range(self._comm.size) if rank not in entries]:
            if self._comm.gone.issuperset(missing):
                return  # a checkpoint of those that are left, where losses are tolerated
            try:
                entries |= read_entries(place.temporary, missing)
                patience.bear(None)
            except OSError as error:
                patience.bear(error)
            has_problem = any("problem" in entry for entry in entries.values())
            now_s = time.monotonic()
            if not has_problem and now_s >= sizes_due_s:  # slow is not gone
                sizes_due_s = now_s + _SIZES_SHARE * self._patience_s
                num_bytes = max(num_bytes, bytes_written(place.temporary))
            silent_s = silence.look(now_s, len(entries) + num_bytes)
            if silent_s > (_AFTER_PROBLEM_S if has_problem else self._patience_s):
                if has_problem:
                    return
                raise RunError(self._waited_in_vain(missing))
            if self._given_up.wait(pause_s):
                raise GivenUpError
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)

    def _waited_in_vain(self, missing: list[int]) -> str:
        names = ", ".join(f"rank {rank} on {self._hosts[rank]}" for rank in missing[:4])
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        return (
            f"{self._folder}: checkpoint is not complete: nothing from {names}{more} for "
            f"{self._patience_s:g} s; check the disk there, then {remedies.going_on()}; "
            f"{last_checkpoint_note(self._run_dir)}"
        )
