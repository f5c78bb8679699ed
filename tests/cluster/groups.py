"""Control groups of a node: freeze all of it, or give it a share of one core (cgroup v1)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
#: Groups bear the number of the process that made them, so that those of a dead one are known as such.
_PREFIX = "speechdp-lab-"
_PERIOD_US = 20_000


@dataclass(frozen=True)
class _Freezer:
    """Where groups that can be frozen are made, and how that is said."""

    root: Path
    file: str
    freeze: str
    thaw: str


_V1 = _Freezer(_ROOT / "freezer", "freezer.state", "FROZEN", "THAWED")
_V2 = _Freezer(_ROOT, "cgroup.freeze", "1", "0")
_CPU = _ROOT / "cpu"


def _freezer() -> _Freezer | None:
    if (_V1.root / "cgroup.procs").exists():
        return _V1
    return _V2 if (_V2.root / "cgroup.controllers").exists() else None


class Groups:
    """The control groups of one node.

    Args:
        node: its name.
    """

    def __init__(self, node: str) -> None:
        self._name = f"{_PREFIX}{os.getpid()}-{node}"
        self._freezer = _freezer()
        self._cpu = _CPU / self._name
        self.why_not_freeze: str | None = None
        if self._freezer is None:
            self.why_not_freeze = "no control groups that can be frozen are mounted under /sys/fs/cgroup"
            return
        self._frozen = self._freezer.root / self._name
        try:
            self._frozen.mkdir()
        except OSError as error:
            self.why_not_freeze = f"{self._frozen} cannot be made ({error.strerror})"

    def folders(self) -> list[Path]:
        """Return the groups that a new process of the node must be put into."""
        frozen = [] if self.why_not_freeze else [self._frozen]
        return [*frozen, *([self._cpu] if self._cpu.exists() else [])]

    def admit(self, pids: Iterable[int]) -> None:
        """Put processes into the node's groups."""
        for folder in self.folders():
            _move(pids, folder)

    def freeze(self) -> None:
        """Stop every process of the node where it is; its connections stay up."""
        assert self._freezer is not None
        assert self.why_not_freeze is None, self.why_not_freeze
        (self._frozen / self._freezer.file).write_text(self._freezer.freeze)

    def thaw(self) -> None:
        """Let the node go on."""
        if self._freezer is not None and self.why_not_freeze is None:
            (self._frozen / self._freezer.file).write_text(self._freezer.thaw)

    def quota(self, percent: int, pids: Iterable[int]) -> None:
        """Give the processes of the node together `percent` % of one core."""
        self._cpu.mkdir(exist_ok=True)
        (self._cpu / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (self._cpu / "cpu.cfs_quota_us").write_text(str(percent * _PERIOD_US // 100))
        _move(pids, self._cpu)

    def no_quota(self, pids: Iterable[int]) -> None:
        """Give the node as much as there is."""
        if self._cpu.exists():
            _move(pids, _CPU)
            _remove(self._cpu)

    def close(self) -> None:
        """Remove the groups of a node whose processes have ended."""
        for folder in self.folders():
            _remove(folder)


def why_no_quota() -> str | None:
    """Return why a node cannot be given a share of a core; None where it can."""
    if (_CPU / "cpu.cfs_quota_us").exists() or (_CPU / "cgroup.procs").exists():
        return None
    return "no cgroup v1 controller of the CPU is mounted at /sys/fs/cgroup/cpu"


def remove_leftovers() -> None:
    """End what a killed run of the tests has left frozen, and remove its groups."""
    freezer = _freezer()
    for folder in _orphaned(freezer):
        if freezer is not None and (folder / freezer.file).exists():
            (folder / freezer.file).write_text(freezer.thaw)
        _remove(folder)


def _orphaned(freezer: _Freezer | None) -> Iterator[Path]:
    for root in [_CPU, *([] if freezer is None else [freezer.root])]:
        for folder in root.glob(f"{_PREFIX}*"):
            owner = folder.name.removeprefix(_PREFIX).split("-")[0]
            if not Path(f"/proc/{owner}").exists():
                yield folder


def _move(pids: Iterable[int], folder: Path) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            (folder / "cgroup.procs").write_text(str(pid))


def _remove(folder: Path) -> None:
    """Remove a group as soon as its last process is gone."""
    deadline = time.monotonic() + 5
    while True:
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                return  # a process that will not die; the next lab tries again
        time.sleep(0.02)
