"""What one host writes is waited for on a network disk, and not on a disk of a host's own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from speechdp.files import listed_anew
from speechdp.watchdog import shared_disk
from speechdp.watchdog.shared_disk import file_system, why_unseen


class Clock:
    """Seconds go by in pauses only; what happens meanwhile is given."""

    def __init__(self, meanwhile: dict[float, Path]) -> None:
        self.now_s, self._meanwhile = 0.0, meanwhile

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        for due_s in [due_s for due_s in self._meanwhile if due_s <= self.now_s]:
            path = self._meanwhile.pop(due_s)
            path.parent.mkdir(parents=True)
            path.touch()


def looked_for_on(
    system: str, path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: dict[float, Path] | None = None
) -> tuple[str | None, float]:
    """Return why a file is not seen, and after how many seconds that was known."""
    clock = Clock(meanwhile or {})
    monkeypatch.setattr(shared_disk, "time", clock)
    monkeypatch.setattr(shared_disk, "file_system", lambda path: system)
    return why_unseen(path), clock.now_s


def test_a_disk_of_a_hosts_own_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script in whose folder each host has one of its own waited 65 s at every start."""
    (tmp_path / "run").mkdir()
    why, after_s = looked_for_on("xfs", tmp_path / "run" / "owner.json", monkeypatch)
    assert why == "xfs is local to that host" and after_s == 0


def test_new_folders_that_a_network_disk_hides_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS remembers for up to a minute that a folder was not there; so it was refused at once."""
    file = tmp_path / "experiment" / "new" / "run" / "owner.json"
    assert looked_for_on("nfs4", file, monkeypatch, {50.0: file}) == (None, pytest.approx(50, abs=0.1))


@pytest.mark.parametrize("system", ["nfs4", ""])
def test_it_is_said_for_how_long_a_network_disk_was_waited_for(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why, after_s = looked_for_on(system, tmp_path / "run" / "owner.json", monkeypatch)
    assert why == "it did not appear within 65 s" and 65 < after_s < 66


def test_an_error_of_a_hosts_own_disk_is_no_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "owner.json"
    file.touch()
    errors = [OSError(5, "Input/output error")] * 3

    def failing(folder: Path) -> list[str]:
        if errors:
            raise errors.pop()
        return listed_anew(folder)

    monkeypatch.setattr(shared_disk, "listed_anew", failing)
    assert looked_for_on("xfs", file, monkeypatch)[0] is None and not errors


def test_the_file_system_of_a_path_is_that_of_what_is_there(tmp_path: Path) -> None:
    assert file_system(Path("/proc/self/no/such")) == "proc"
    link = tmp_path / "link"
    link.symlink_to("/proc/self/nowhere")
    assert file_system(link / "run") == "proc"


def test_nothing_is_claimed_of_a_host_that_does_not_tell_its_mounts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_disk, "os", SimpleNamespace(path=shared_disk.os.path, open=refuse, O_PATH=0))
    assert file_system(tmp_path) == ""


def refuse(*arguments: object) -> int:
    raise PermissionError
