"""Write checkpoints during training: a thread of each rank writes its file, rank 0's completes the folder.

A rank's thread writes its file into RUN/checkpoints/.step-00000120.NONCE.tmp/ and then an entry about it
beside it.  Rank 0's thread waits for all entries, writes checkpoint.json, and renames the folder to its final
name.  Every start draws a new nonce, so that leftovers of a killed job are never mixed in.  The threads
exchange nothing over the communicator: they need only the shared disk.
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
    hand_over_entry,
    not_saved,
    prune,
    read_entries,
)
from speechdp.checkpoint.rank_file import GivenUpError, Snapshot, take_snapshot, write_rank_file
from speechdp.checkpoint.state import RankState, last_checkpoint_note
from speechdp.comm.base import Communicator
from speechdp.comm.environment import host_name
from speechdp.errors import RunError
from speechdp.files import cannot_be_read, disk_reason
from speechdp.watchdog.shared_disk import LOOK_S, Patience, not_shared, why_unseen
from speechdp.watchdog.watchdog import Stillness

#: Seconds that rank 0 waits while no other rank's file grows, and, after a rank failed to write, for the
#: others.
PATIENCE_S, _AFTER_PROBLEM_S = 600.0, 2.0
#: Seconds that a failed run gives the checkpoint being written.
_GRACE_S = 2.0
_LONGEST_PAUSE_S = 0.2
#: Share of its patience after which rank 0 checks the files' sizes again; on a network disk that takes one
#: request per file.
_SIZES_SHARE = 0.1


class CheckpointWriter:
    """Writes a run's checkpoints, one at a time, while training continues.

    Args:
        run_dir: the run's folder, on a disk all hosts share.
        comm: the ranks.
        beat: called while this rank's file is written, so that a slow disk does not count as a hang.
        patience_s: time rank 0 waits while nothing arrives from the others, s.
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
        self._has_failed_to_hand_over = False
        self._written: list[int] = []
        self._resumed_from: int | None = None
        self._given_up = threading.Event()

    def open(self) -> None:
        """Agree on a nonce and check that the ranks share the disk; only the first call does.  Collective.

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
            answers = comm.allgather_object((host_name(), *self._look_for(probe)))
            self._hosts = [host for host, _, _ in answers]
            problem = next(
                (
                    unreadable or not_shared(self._folder, rank, self._hosts, unseen)
                    for rank, (_, unseen, unreadable) in enumerate(answers)
                    if unreadable or unseen
                ),
                None,
            )
            if comm.rank == 0:
                with contextlib.suppress(OSError):  # the next start deletes it
                    probe.unlink(missing_ok=True)
        if problem is not None:
            raise RunError(problem)
        self._nonce = nonce

    def _prepare(self, probe: Path) -> str | None:
        """Make the folder, delete leftovers of killed jobs, and write a probe file for the others to see."""
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
        """Return why this rank does not see the file, or the message about an unreadable folder."""
        try:
            return why_unseen(probe), None
        except OSError as error:
            entry = self._problem(error)
            reported = OSError(entry["errno"], entry["problem"])
            return None, cannot_be_read(self._folder, reported, remedies.resuming())

    def resume_from(self, step: int) -> None:
        """Record which checkpoint was loaded; it is kept until newer ones replace it."""
        self._resumed_from = step

    def start(self, step: int, state: RankState) -> Path:
        """Begin to write a checkpoint once the previous one is done; return its final path.  Collective.

        The caller may change the state once this returns.

        Raises:
            RunError: the previous checkpoint could not be written.
        """
        self.open()
        self._join()
        self.check()
        name = f"step-{step:08d}"
        # With a number, as asynchronous ranks may save twice at a step, and rank 0 may be behind the others.
        self._num_begun += 1
        temporary = self._folder / f".{name}.{self._nonce}-{self._num_begun}.tmp"
        place = CheckpointPlace(step, temporary, self._folder / name)
        self._snapshot = take_snapshot(state, self._snapshot)
        thread = threading.Thread(target=self._work, args=(place,), name="speechdp-checkpoint", daemon=True)
        thread.start()
        self._thread = thread  # only once started: `close` would fail on a thread the system refused to start
        return place.final

    def check(self) -> None:
        """Raise this rank's background error, if there was one, e.g. RunError for a full disk."""
        if self._failure is not None:
            raise self._failure

    def flush(self) -> None:
        """Wait until the checkpoint that was begun is complete on disk.  Collective.

        Raises:
            RunError: it could not be written; raised on all ranks, or on this rank alone if it could not
                hand its entry to rank 0.
        """
        self._join()
        if self._failure is not None and not isinstance(self._failure, RunError):
            raise self._failure
        if self._failure is not None and self._has_failed_to_hand_over:
            raise self._failure  # rank 0 still waits for this rank's entry, and joins no exchange before
        problem = None if self._failure is None else str(self._failure)
        for other in self._comm.allgather_object(problem):
            if other is not None:
                raise RunError(other)

    def close(self) -> None:
        """Give a pending checkpoint some seconds to complete, then abandon it.  Safe to call twice."""
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
                self._hand_over(place, entry)
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
                path.unlink(missing_ok=True)  # the other ranks' files may need its space
            return {"file": path.name, **self._problem(error)}
        return {"file": path.name, "sha256": sha256, "bytes": num_bytes}

    def _hand_over(self, place: CheckpointPlace, entry: Entry) -> None:
        try:
            hand_over_entry(place, self._comm.rank, entry)
        except OSError as error:
            self._has_failed_to_hand_over = True
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
            if len(entries) == self._comm.size:  # else another rank may still be writing
                shutil.rmtree(place.temporary, ignore_errors=True)
            raise RunError(not_saved(self._run_dir, error)) from error
        self._written.append(place.step)
        prune(self._run_dir, self._written, self._resumed_from)

    def _collect(self, place: CheckpointPlace, entries: dict[int, Entry]) -> None:
        silence, pause_s, num_bytes = Stillness(time.monotonic(), LOOK_S), 0.002, 0
        patience, sizes_due_s = Patience(), time.monotonic()
        while missing := [rank for rank in range(self._comm.size) if rank not in entries]:
            if self._comm.gone.issuperset(missing):
                return  # losses are tolerated: it becomes a checkpoint of the remaining ranks
            try:
                entries |= read_entries(place.temporary, missing)
                patience.bear(None)
            except OSError as error:
                patience.bear(error)
            has_problem = any("problem" in entry for entry in entries.values())
            now_s = time.monotonic()
            if not has_problem and now_s >= sizes_due_s:  # a slow rank, whose file grows, is not lost
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
            f"{self._patience_s:g} s; check the disk there, then {remedies.resuming()}; "
            f"{last_checkpoint_note(self._run_dir)}"
        )
