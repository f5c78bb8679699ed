"""The nodes themselves: apart where machines are, joined by their links, and gone when the tests are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.groups import remove_leftovers
from tests.cluster.lab import Lab, why_not
from tests.helpers.mpi import REPOSITORY

#: Brings a node up, tells its first process, and waits to be killed.
HOLDER = """
import sys, time
from pathlib import Path
from tests.cluster.lab import Lab
with Lab(1, Path(sys.argv[1])) as lab:
    lab.start("n1", ["sleep", "600"], mark="none")
    while not lab.pids("n1"):
        time.sleep(0.01)
    if sys.argv[2] == "frozen":
        lab.freeze("n1")
    print(*lab.pids("n1"), flush=True)
    time.sleep(600)
"""


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 240
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds


def reaches(lab: Lab, name: str) -> bool:
    """Tell whether n1 can log in to a node within a second."""
    return lab.on("n1", ["ssh", "-o", "ConnectTimeout=1", name, "true"]).exit_code == 0


def comes_to_reach(lab: Lab, name: str) -> bool:
    """Tell whether n1 can log in to a node, which may take a busy one a while."""
    return wait_until(lambda: reaches(lab, name))


def test_a_node_has_a_name_processes_and_tmp_of_its_own(lab: Lab, tmp_path: Path) -> None:
    (lab.folder / "note").write_text("shared")
    script = f"hostname; cat {lab.folder}/note; ls -d /proc/[0-9]* | wc -l; ls -d {tmp_path} /sys/class/net/*"
    ended = lab.on("n1", ["ssh", "n2", script])
    name, note, *interfaces = ended.stdout.replace("shared", "shared\n").split()
    assert (name, note) == ("n2", "shared"), ended.output
    assert int(interfaces.pop(0)) < 30
    assert interfaces == ["/sys/class/net/eth0", "/sys/class/net/lo"], ended.output
    assert "No such file" in ended.stderr


def test_links_are_cut_and_mended_and_nodes_killed_and_revived(lab: Lab) -> None:
    lab.cut("n2")
    assert not reaches(lab, "n2")
    lab.mend("n2")
    lab.kill_node("n3")
    assert comes_to_reach(lab, "n2") and not reaches(lab, "n3")
    lab.revive("n3")
    assert comes_to_reach(lab, "n3")


def test_nothing_is_put_on_the_machine_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    # On a busy machine unshare is started some time before it has a network of its own.
    late = tmp_path / "bin" / "unshare"
    late.parent.mkdir()
    # The switch alone: a node is waited for, and its wait would cover the switch's.
    script = f'#!/bin/sh\ncase "$*" in *--uts*) ;; *) sleep 2 ;; esac\nexec {shutil.which("unshare")} "$@"\n'
    late.write_text(script)
    late.chmod(0o755)
    monkeypatch.setenv("PATH", f"{late.parent}:{os.environ['PATH']}")
    machines = sorted(Path("/sys/class/net").iterdir())
    with Lab(1, tmp_path / "lab"):
        assert sorted(Path("/sys/class/net").iterdir()) == machines


def test_what_was_started_on_a_node_is_found_and_ended(lab: Lab) -> None:
    job = lab.start("n1", ["ssh", "n2", "sleep 600"], mark="none")
    assert wait_until(lambda: len(lab.pids("n2")) >= 2)  # sshd's session and what it runs
    assert job.pid in lab.pids("n1")
    lab.end_jobs()
    assert wait_until(lambda: not lab.pids("n1") and not lab.pids("n2"))
    job.finish()


def test_a_machine_without_the_programs_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    here = shutil.which
    absent = ("tc", "/usr/sbin/sshd")
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool in absent else here(tool) or tool)
    expected = "tc, /usr/sbin/sshd not found; apt-get install iproute2 openssh-server"
    assert why_not.__wrapped__() == expected


def test_a_user_who_is_not_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "need root" in (why_not.__wrapped__() or "")


@pytest.mark.parametrize("state", ["running", "frozen"])
def test_nodes_of_killed_tests_go_with_them(lab: Lab, tmp_path: Path, state: str) -> None:
    if state == "frozen" and lab.why_not_freeze is not None:
        pytest.skip(lab.why_not_freeze)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), state],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        (pid,) = holder.stdout.readline().split()
        holder.kill()
    if state == "frozen":
        remove_leftovers()  # as the next lab does when it is brought up
    assert wait_until(lambda: not Path(f"/proc/{pid}").exists())
