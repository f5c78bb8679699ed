"""One node of the lab: the process that holds its namespaces, and the files all nodes read."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_INIT = Path(__file__).with_name("node_init.sh")
_READY_S = 120.0

_SSH_CONFIG = """\
Host *
  IdentityFile {files}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {files}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  BatchMode yes
  ConnectTimeout 30
  LogLevel ERROR
"""
_SSHD_CONFIG = """\
HostKey {files}/host_key
AuthorizedKeysFile {files}/user_key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
UseDNS no
PidFile /run/sshd.pid
MaxStartups 100:30:200
MaxSessions 100
"""
#: What the machine's surroundings may say of launchers and scratch folders does not hold on a node.
_ON = """\
#!/bin/sh
# on NODE COMMAND...: run a command on a node, as from its console
node=$1
shift
pid=$(cat '{files}'/"$node".pid) || exit
while read -r group; do echo $$ >"$group"/cgroup.procs; done <'{files}'/"$node".groups
unset TMPDIR HOSTNAME OMPI_MCA_plm SSH_AUTH_SOCK
exec nsenter --target "$pid" --net --uts --mount --ipc --pid -- env --chdir="$PWD" "$@"
"""


def write_files(files: Path, addresses: Mapping[str, str]) -> None:
    """Write keys, settings of ssh and sshd, /etc/hosts and the program `on` of the nodes."""
    for key in ("user_key", "host_key"):
        (files / key).unlink(missing_ok=True)
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", str(files / key)],
            check=True,
            stdin=subprocess.DEVNULL,
        )
    names = ",".join([*addresses, *addresses.values()])
    (files / "known_hosts").write_text(f"{names} {(files / 'host_key.pub').read_text()}")
    (files / "ssh_config").write_text(_SSH_CONFIG.format(files=files))
    (files / "sshd_config").write_text(_SSHD_CONFIG.format(files=files))
    (files / "on").write_text(_ON.format(files=files))
    (files / "on").chmod(0o755)
    lines = [f"{address} {name}" for name, address in addresses.items()]
    (files / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))


class Node:
    """A node that is up as long as its first process is.

    Args:
        name: its host name.
        files: where write_files has written.
        shared: folders under /tmp that it shares with the machine.
    """

    def __init__(self, name: str, files: Path, shared: Sequence[Path]) -> None:
        self._name = name
        self._files = files
        with (files / f"{name}.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["unshare", "--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--kill-child",
                 str(_INIT), name, str(files), *map(str, shared)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                start_new_session=True,
            )  # fmt: skip
        self._own: frozenset[int] = frozenset()
        try:
            self.pid = int(self._read_line())
            self._namespace = (Path("/proc") / str(self.pid) / "ns" / "pid").readlink()
        except BaseException:
            self._process.kill()
            self._process.communicate()
            raise

    def go(self, address: str, groups: Sequence[Path]) -> None:
        """Let the node set up its interface, which must be there by now."""
        (self._files / f"{self._name}.pid").write_text(f"{self.pid}\n")
        self.note_groups(groups)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{address}\n")
        self._process.stdin.flush()

    def wait_until_ready(self) -> None:
        """Wait until one can log in; what runs by then belongs to the node itself."""
        assert self._read_line() == "ready", self._log()
        deadline = time.monotonic() + _READY_S
        while len(self.all_pids()) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        self._own = frozenset(self.all_pids())

    def is_up(self) -> bool:
        """Tell whether the node runs, frozen or not."""
        return self._process.poll() is None

    def note_groups(self, groups: Sequence[Path]) -> None:
        """Note the control groups that processes started from outside must join."""
        (self._files / f"{self._name}.groups").write_text("".join(f"{group}\n" for group in groups))

    def all_pids(self) -> list[int]:
        """Return every process of the node but those that have ended, the node's own too."""
        return [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit() and self._holds(one)]

    def started(self) -> list[int]:
        """Return the processes of the node that are not its own."""
        return [pid for pid in self.all_pids() if pid not in self._own]

    def close(self) -> None:
        """Kill the node's first process; the kernel ends all others with it."""
        (self._files / f"{self._name}.pid").unlink(missing_ok=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.communicate()

    def _holds(self, process: Path) -> bool:
        try:
            if (process / "ns" / "pid").readlink() != self._namespace:
                return False
            return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], _READY_S)[0]:
            raise AssertionError(f"{self._name} did not come up in {_READY_S:g} s\n{self._log()}")
        line = self._process.stdout.readline().strip()
        assert line, f"{self._name} did not come up\n{self._log()}"
        return line

    def _log(self) -> str:
        return (self._files / f"{self._name}.log").read_text(errors="replace")
