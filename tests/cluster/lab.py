"""A small cluster on one machine: nodes with a network, host name, processes, /tmp and sshd of their own.

Everything outside /tmp, /run, /etc and /dev/shm is shared by the nodes, and of /tmp the lab's folder: it
stands for a file server.  All of it hangs on processes of this one: when it ends, however, they end too.
Needs root, and from Debian iproute2, openssh-server and util-linux.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.cluster.groups import Groups, remove_leftovers, why_no_quota
from tests.cluster.node import Node, write_files
from tests.helpers.gates import Gates
from tests.helpers.jobs import DEADLINE_S, Job
from tests.helpers.mpi import REPOSITORY, Ended, run_job

#: Debian's package of each program needed.
_TOOLS = {
    "ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux",
    "ssh": "openssh-client", "ssh-keygen": "openssh-client", "/usr/sbin/sshd": "openssh-server",
}  # fmt: skip
_NAMESPACES = ("--net", "--uts", "--mount", "--ipc", "--pid", "--fork")
#: What a node needs of the kernel, tried in namespaces that end at once.
_TRIAL = (
    "mount -t proc proc /proc && mount -t tmpfs tmpfs /run && ip link add br0 type bridge && "
    "ip link add name veth0 type veth peer name veth1"
)


@functools.cache
def why_not() -> str | None:
    """Return why this process cannot bring up nodes; None where it can."""
    missing = {tool: package for tool, package in _TOOLS.items() if shutil.which(tool) is None}
    if missing:
        tools, packages = ", ".join(missing), " ".join(sorted(set(missing.values())))
        return f"{tools} not found; apt-get install {packages}"
    if os.geteuid() != 0:
        return "nodes are namespaces, which need root; run it as root, or in a container with --privileged"
    trial = subprocess.run(
        ["unshare", *_NAMESPACES, "sh", "-c", _TRIAL], capture_output=True, text=True, check=False
    )
    if trial.returncode != 0:
        lines = trial.stderr.strip().splitlines() or [f"exit code {trial.returncode}"]
        return f"namespaces are not allowed here ({lines[-1]}); in a container start it with --privileged"
    return None


class Lab:
    """Nodes n1, n2, ... on a switch; a context manager.

    Args:
        num_nodes: how many.
        folder: shared by all nodes, for hostfiles, data and runs; the lab's own files are in folder/nodes.
    """

    def __init__(self, num_nodes: int, folder: Path) -> None:
        self.folder = folder.resolve()
        self.names = [f"n{number}" for number in range(1, num_nodes + 1)]
        self._files = self.folder / "nodes"
        self.ssh_config = self._files / "ssh_config"
        self._nodes: dict[str, Node] = {}
        self._groups: dict[str, Groups] = {}
        self._switch: subprocess.Popen[bytes] | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Lab:
        reason = why_not()
        assert reason is None, reason
        remove_leftovers()
        with ExitStack() as stack:  # what fails half-way is taken down again
            self._files.mkdir(parents=True, exist_ok=True)
            addresses = {name: f"10.77.0.{number}" for number, name in enumerate(self.names, start=1)}
            write_files(self._files, addresses)
            self._addresses = addresses
            stack.callback(self._end_switch)
            # It says when it has left the machine's own network: until then what is put on it would go there.
            self._switch = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "echo apart; exec cat >/dev/null"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            assert self._switch.stdout is not None
            assert self._switch.stdout.readline() == b"apart\n", "unshare --net failed"
            stack.callback(self._end_nodes)
            for name in self.names:
                self._groups[name] = Groups(name)
                self._nodes[name] = self._new_node(name)
            self._on_switch("link add br0 type bridge forward_delay 0", "link set br0 up")
            self._connect(self.names)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def why_not_freeze(self) -> str | None:
        """Why nodes cannot be frozen here; None: they can."""
        return self._groups["n1"].why_not_freeze

    @property
    def why_no_quota(self) -> str | None:
        """Why nodes cannot be given a share of a core; None: they can."""
        return why_no_quota()

    def address(self, name: str) -> str:
        """Return the IPv4 address of a node."""
        return self._addresses[name]

    def hostfile(self, slots: int, names: Sequence[str] = ()) -> Path:
        """Write a hostfile with `slots` slots a node, of all nodes or of those named, in that order."""
        chosen = list(names or self.names)
        path = self.folder / f"hosts-{'-'.join(chosen)}-{slots}"
        path.write_text("".join(f"{name} slots={slots}\n" for name in chosen))
        return path

    def command(self, name: str, argv: Sequence[str | Path]) -> list[str]:
        """Return the command that, run on the machine, runs `argv` on a node as from its console."""
        return [str(self._files / "on"), name, *map(str, argv)]

    def on(
        self,
        name: str,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 240,
    ) -> Ended:
        """Run a command on a node to its end; on a time-out kill it and fail with its output."""
        return run_job(self.command(name, argv), env=env, timeout_s=timeout_s)

    def start(
        self, name: str, argv: Sequence[str | Path], *, mark: str | Path, gates: Gates | None = None
    ) -> NodeJob:
        """Start a command on a node, a job that waits at its gates.

        Args:
            mark: a word that only the ranks' command lines have.
        """
        return NodeJob(self.command(name, argv), str(mark), None if gates is None else gates.env)

    def pids(self, name: str) -> list[int]:
        """Return the processes that were started on a node and still run, as the machine counts them."""
        return self._nodes[name].started()

    def end_jobs(self) -> None:
        """Kill everything that was started on the nodes, daemons too."""
        for name in self.names:
            for pid in self.pids(name):
                _kill(pid)

    def kill_node(self, name: str) -> None:
        """End a node and every process on it at once, as when its operating system dies."""
        self.thaw(name)  # a frozen process cannot die
        self._nodes[name].close()
        # The kernel takes the link away some time after the node's network: not to be waited for.
        subprocess.run(self._in_switch("ip", "link", "del", f"to-{name}"), capture_output=True, check=False)

    def revive(self, name: str) -> None:
        """Bring a node up again that was killed."""
        self._nodes[name] = self._new_node(name)
        self._connect([name])

    def restore(self) -> None:
        """Bring all nodes back to what they were at first: up, joined, thawed, idle."""
        for name in self.names:
            if self._nodes[name].is_up():
                self.thaw(name)
                self.quota(name, None)
                self.free(name)
                self.mend(name)
            else:
                self.revive(name)
        self.end_jobs()

    def cut(self, name: str) -> None:
        """Pull the plug of a node's link; it runs on, alone."""
        self._on_switch(f"link set to-{name} down")

    def mend(self, name: str) -> None:
        """Plug the link in again."""
        self._on_switch(f"link set to-{name} up")

    def limit(self, name: str, rate: str) -> None:
        """Limit a node's link both ways to `rate` as tc writes it: 1gbit, 100mbit."""
        self.free(name)
        for where in self._ends_of_link(name):
            _run(*where, "root", "tbf", "rate", rate, "burst", "256kb", "latency", "30ms")

    def free(self, name: str) -> None:
        """Take a limit off again, if there is one."""
        for where in self._ends_of_link(name, "del"):
            subprocess.run([*where, "root"], capture_output=True, check=False)

    def freeze(self, name: str) -> None:
        """Stop every process of a node where it is; its link and connections stay up."""
        self._groups[name].freeze()

    def thaw(self, name: str) -> None:
        """Let a frozen node go on."""
        self._groups[name].thaw()

    def quota(self, name: str, percent: int | None) -> None:
        """Give the processes of a node together `percent` % of one core; None: as much as there is."""
        pids = self._nodes[name].all_pids()
        groups = self._groups[name]
        groups.no_quota(pids) if percent is None else groups.quota(percent, pids)
        self._nodes[name].note_groups(groups.folders())

    def _new_node(self, name: str) -> Node:
        folders = {self.folder, REPOSITORY, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
        in_tmp = {folder for folder in folders if folder.is_relative_to("/tmp")}
        # A folder within another of them comes with it.
        shared = sorted(one for one in in_tmp if not in_tmp & set(one.parents))
        return Node(name, self._files, shared)

    def _connect(self, names: Sequence[str]) -> None:
        """Join new nodes to the switch and wait until they are up."""
        lines = []
        for name in names:
            pid = self._nodes[name].pid
            self._groups[name].admit([pid])
            # Its own hardware address, so that the others find it after it was brought up again.
            mac = f"02:00:00:00:00:{self.names.index(name) + 1:02x}"
            lines += [
                f"link add to-{name} type veth peer name eth0 address {mac} netns {pid}",
                f"link set to-{name} master br0 up",
            ]
        self._on_switch(*lines)
        for name in names:
            self._nodes[name].go(self._addresses[name], self._groups[name].folders())
        for name in names:
            self._nodes[name].wait_until_ready()

    def _ends_of_link(self, name: str, verb: str = "add") -> list[list[str]]:
        inside = ["nsenter", "--target", str(self._nodes[name].pid), "--net"]
        return [
            self._in_switch("tc", "qdisc", verb, "dev", f"to-{name}"),
            [*inside, "tc", "qdisc", verb, "dev", "eth0"],
        ]

    def _on_switch(self, *commands: str) -> None:
        lines = "\n".join(commands) + "\n"
        _run(*self._in_switch("ip", "-batch", "-"), given=lines)

    def _in_switch(self, *command: str) -> list[str]:
        assert self._switch is not None
        return ["nsenter", "--target", str(self._switch.pid), "--net", *command]

    def _end_nodes(self) -> None:
        for name, node in self._nodes.items():
            self.thaw(name)
            node.close()
        for groups in self._groups.values():
            groups.close()

    def _end_switch(self) -> None:
        if self._switch is not None:
            self._switch.kill()
            self._switch.communicate()


class NodeJob(Job):
    """A job whose launcher runs on a node; signals go to the launcher itself."""

    @property
    def pid(self) -> int:
        """The launcher; it is a child of the program that went into the node's namespaces."""
        outer = self._process.pid
        deadline = time.monotonic() + DEADLINE_S
        while self._process.poll() is None and time.monotonic() < deadline:
            children = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
            if children:
                return int(children[0])
            time.sleep(0.01)
        return outer


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _run(*command: str, given: str = "") -> None:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}\n{given}"
