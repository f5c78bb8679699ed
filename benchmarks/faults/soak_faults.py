"""Faults for benchmarks/faults/soak.py: what is broken on a lab's nodes, and how it is mended again."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.lab import Lab

#: How long a node stays down, cut off or frozen, s: longer than the job needs to give it up.
_DOWN_S = 40.0
_STALL_S = 8.0
#: A slow disk: it answers for so long, then not for so long, again and again, s.
_SLOW_S, _ANSWERS_S, _SILENT_S = 20.0, 0.2, 0.8
_DISK_MIB = 2048


def why_no_disk() -> str | None:
    """Return why no disk can be made that can be stopped; None where it can."""
    missing = [name for name in ("losetup", "mkfs.ext4", "fsfreeze") if shutil.which(name) is None]
    return f"{', '.join(missing)} not found; apt-get install e2fsprogs util-linux" if missing else None


@contextmanager
def stoppable_disk() -> Iterator[Disk]:
    """Mount a file as a disk outside /tmp, where nodes of a lab that is brought up later see it."""
    folder = Path(tempfile.mkdtemp(prefix="speechdp-soak-", dir="/var/tmp"))
    image, mounted = folder / "image", folder / "disk"
    try:
        with image.open("wb") as file:
            file.truncate(_DISK_MIB << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
        mounted.mkdir()
        subprocess.run(["mount", "-o", "loop", str(image), str(mounted)], check=True)
        disk = Disk(mounted)
        try:
            yield disk
        finally:
            disk.thaw()
            subprocess.run(["umount", "--lazy", str(mounted)], check=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Disk:
    """A file system whose writes can be stopped: every write waits until it is thawed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._frozen = False

    def freeze(self) -> None:
        """Stop all writes."""
        subprocess.run(["fsfreeze", "--freeze", str(self.path)], check=True)
        self._frozen = True

    def thaw(self) -> None:
        """Let writes go on."""
        if self._frozen:
            subprocess.run(["fsfreeze", "--unfreeze", str(self.path)], check=True)
            self._frozen = False


@dataclass(frozen=True)
class Fault:
    """A fault that has been caused.

    Attributes:
        kind: what was done.
        where: rank and node, node or disk.
        restarts: whether the job must end of it and be started again.
    """

    kind: str
    where: str
    restarts: bool


class Faults:
    """Breaks things at random on the nodes that a run uses, and mends them after a while in the background.

    The first node is spared, where the launcher runs; only its rank is killed.

    Args:
        run: the run's folder; its status files tell which node each rank is on.
    """

    def __init__(self, lab: Lab, disk: Disk, run: Path, seed: int) -> None:
        self._lab, self._disk, self._run = lab, disk, run
        self._random = random.Random(seed)
        self._mending: list[threading.Timer] = []
        self._kinds: list[Callable[[], Fault]] = [
            self._kill_rank,
            self._kill_node,
            self._cut_link,
            self._freeze_node,
            self._stall_disk,
            self._slow_disk,
        ]
        self._due: list[Callable[[], Fault]] = []

    def cause(self) -> Fault:
        """Cause a fault: each kind once in random order, then anew.  A killed rank comes twice as often."""
        if not self._due:
            self._due = [*self._kinds, self._kill_rank]
            self._random.shuffle(self._due)
        return self._due.pop()()

    def wait_until_mended(self) -> None:
        """Return once everything works again."""
        for timer in self._mending:
            timer.join()
        self._mending.clear()

    def close(self) -> None:
        """Mend nothing any more: the nodes go down."""
        for timer in self._mending:
            timer.cancel()

    def ranks(self) -> dict[int, tuple[str, int]]:
        """Return host and pid (as its node counts) of each rank, by its own word."""
        found = {}
        for path in sorted((self._run / "status").glob("rank-*.json")):
            with contextlib.suppress(OSError, ValueError):
                status = json.loads(path.read_text())
                found[int(status["rank"])] = (str(status["host"]), int(status["pid"]))
        return found

    def _kill_rank(self) -> Fault:
        rank = self._random.choice(sorted(self.ranks()))
        host = self.ranks()[rank][0]
        os.kill(self._pid_of(rank), signal.SIGKILL)
        return Fault("rank killed", f"rank {rank} on {host}", restarts=True)

    def _kill_node(self) -> Fault:
        node = self._other_node()
        self._lab.kill_node(node)
        self._later(lambda: self._lab.revive(node))
        return Fault("node killed", node, restarts=True)

    def _cut_link(self) -> Fault:
        node = self._other_node()
        self._lab.cut(node)
        self._later(lambda: self._lab.mend(node))
        return Fault("link cut", node, restarts=True)

    def _freeze_node(self) -> Fault:
        node = self._other_node()
        self._lab.freeze(node)
        self._later(lambda: self._lab.thaw(node))
        return Fault("node frozen", node, restarts=True)

    def _stall_disk(self) -> Fault:
        self._disk.freeze()
        time.sleep(_STALL_S)
        self._disk.thaw()
        return Fault("disk stalled", f"{_STALL_S:g} s", restarts=False)

    def _slow_disk(self) -> Fault:
        end = time.monotonic() + _SLOW_S
        while time.monotonic() < end:
            self._disk.freeze()
            time.sleep(_SILENT_S)
            self._disk.thaw()
            time.sleep(_ANSWERS_S)
        return Fault("disk slow", f"{_SLOW_S:g} s", restarts=False)

    def _other_node(self) -> str:
        """Return a node that the run uses, not the first."""
        used = {host for host, _ in self.ranks().values()}
        return self._random.choice(sorted(used - {self._lab.names[0]}))

    def _pid_of(self, rank: int) -> int:
        """Return a rank's process as this machine counts."""
        wanted = {f"OMPI_COMM_WORLD_RANK={rank}".encode()}
        for node in self._lab.names:
            for pid in self._lab.pids(node):
                with contextlib.suppress(OSError):
                    words = set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
                    program = Path(f"/proc/{pid}/cmdline").read_bytes()
                    if wanted <= words and str(self._run).encode() in program:
                        return pid
        raise LookupError(f"there is no rank {rank}")

    def _later(self, mend: Callable[[], None]) -> None:
        timer = threading.Timer(_DOWN_S, mend)
        timer.start()
        self._mending.append(timer)
