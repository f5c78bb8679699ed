"""Nodes on one machine: network namespaces joined by links whose rate can be limited both ways.

Each node has a network and a host name of its own; files and processes are the machine's.  Needs root, `ip`
and `tc` (Debian: iproute2) and `unshare` (util-linux).  mpirun starts its daemons by `agent` instead of ssh.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

_NETWORK = "10.78.0"
#: Namespaces find what replaces /etc/hosts here: `ip netns exec` binds it over the machine's.
_ETC = Path("/etc/netns")


def why_not() -> str | None:
    """Return why this process cannot make namespaces, None where it can."""
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found; install iproute2 and util-linux"
    if os.geteuid() != 0:
        return "network namespaces need root; run it as root, or in a container started with --privileged"
    return None


class Nodes:
    """`size` nodes n1, n2, ... with an interface eth0 each, joined by a bridge; a context manager.

    Namespaces bear this process's number, so several such sets may stand side by side.
    """

    def __init__(self, size: int) -> None:
        self.names = [f"n{i + 1}" for i in range(size)]
        self._prefix = f"sdpb{os.getpid()}"
        self._stack = ExitStack()
        self.agent = Path()

    def __enter__(self) -> Nodes:
        with ExitStack() as stack:  # what fails half-way is taken down again
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            self.agent = folder / "agent"
            self.agent.write_text(agent_script(self._prefix))
            self.agent.chmod(0o755)
            self._make_switch(stack)
            for number, name in enumerate(self.names, start=1):
                self._make_node(stack, number, name)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
        self._stack.close()

    def _make_switch(self, stack: ExitStack) -> None:
        self._make_namespace(stack, "sw")
        run_tool(
            "ip", "-n", self._namespace("sw"), "link", "add", "br0", "type", "bridge", "forward_delay", "0"
        )
        run_tool("ip", "-n", self._namespace("sw"), "link", "set", "br0", "up")

    def _make_node(self, stack: ExitStack, number: int, name: str) -> None:
        inside = self._namespace(name)
        folder = _ETC / inside
        folder.mkdir(parents=True, exist_ok=True)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        (folder / "hosts").write_text(hosts_file(self.names))
        self._make_namespace(stack, name)
        self._make_interface(number, name)
        run_tool("ip", "-n", inside, "addr", "add", f"{_NETWORK}.{number}/24", "dev", "eth0")
        run_tool("ip", "-n", inside, "link", "set", "eth0", "up")

    def _make_interface(self, number: int, name: str) -> None:
        """Make a node's eth0 and join it to the switch."""
        switch, port = self._namespace("sw"), f"to-{name}"
        run_tool("ip", "link", "add", "name", port, "netns", switch, "type", "veth",
             "peer", "name", "eth0", "netns", self._namespace(name))  # fmt: skip
        run_tool("ip", "-n", switch, "link", "set", port, "master", "br0", "up")

    def _make_namespace(self, stack: ExitStack, name: str) -> None:
        namespace = self._namespace(name)
        run_tool("ip", "netns", "add", namespace)
        stack.callback(subprocess.run, ["ip", "netns", "del", namespace], check=False)
        run_tool("ip", "-n", namespace, "link", "set", "lo", "up")

    def _namespace(self, name: str) -> str:
        return self._prefix + name

    def limit(self, rate: str) -> None:
        """Limit every link both ways to `rate` as tc writes it (1gbit, 100mbit), or not at all (free)."""
        for name in self.names:
            for namespace, device in ((self._namespace(name), "eth0"), (self._namespace("sw"), f"to-{name}")):
                where = ["tc", "-n", namespace, "qdisc"]
                subprocess.run([*where, "del", "dev", device, "root"], capture_output=True, check=False)
                if rate != "free":
                    run_tool(*where, "add", "dev", device, "root", "tbf", "rate", rate,
                         "burst", "256kb", "latency", "30ms")  # fmt: skip

    def on(self, name: str) -> list[str]:
        """Return the words with which the command that follows runs on a node, its words as they are."""
        return ["ip", "netns", "exec", self._namespace(name), "unshare", "--uts",
                "sh", "-c", 'hostname "$0" && exec "$@"', name]  # fmt: skip

    def mpirun(self, program: Sequence[str], *, ranks: int = 0, ranks_per_node: int = 1) -> list[str]:
        """Return the command that runs `program` on the nodes, node after node; mpirun itself runs on n1.

        Args:
            ranks: of the job; 0: as many as fit on the nodes.
            ranks_per_node: of each node.
        """
        ranks = ranks or ranks_per_node * len(self.names)
        hosts = ",".join(f"{name}:{ranks_per_node}" for name in self.names[: -(-ranks // ranks_per_node)])
        mpirun = str(Path(sys.prefix) / "bin" / "mpirun")
        command = [mpirun, "-n", str(ranks), "--host", hosts, "--bind-to", "none"]
        for option in ("btl_tcp_if_include", "oob_tcp_if_include"):
            command += ["--mca", option, "eth0"]
        command += ["--mca", "plm_rsh_agent", str(self.agent), *program]
        return [str(self.agent), self.names[0], shlex.join(command)]

    def kill(self) -> None:
        """End every process that runs on a node."""
        for name in self.names:
            found = subprocess.run(
                ["ip", "netns", "pids", self._namespace(name)], capture_output=True, text=True, check=False
            )
            for pid in found.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


def agent_script(prefix: str) -> str:
    """Return the script that runs a shell command on a node: `agent NODE COMMAND...`, as ssh would."""
    return (
        "#!/bin/sh\n"
        "host=$1; shift\n"
        f'exec ip netns exec {prefix}"$host" unshare --uts sh -c "hostname $host && $*"\n'
    )


def hosts_file(names: Sequence[str]) -> str:
    """Return /etc/hosts of the nodes."""
    lines = [f"{_NETWORK}.{number} {name}" for number, name in enumerate(names, start=1)]
    return "\n".join(["127.0.0.1 localhost", *lines, ""])


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Leave by an exception on SIGTERM and SIGHUP too, so that everything is taken down."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def run_tool(*command: str) -> None:
    """Run a command of the system's; leave with what it says where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
