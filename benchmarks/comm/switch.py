"""Nodes on one machine, joined by a switch with a bandwidth and a latency (switch.c).

It does without netem, which not every kernel has.
Needs /dev/net/tun and a C compiler beside what namespaces.py needs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

from benchmarks.comm.namespaces import Nodes, run_tool
from benchmarks.comm.namespaces import why_not as why_no_namespaces

_SOURCE = Path(__file__).with_name("switch.c")
#: Of the switch's process: frames must not be late because a rank computes.
_NICE = -15


def why_not() -> str | None:
    """Return why this process cannot make such nodes, None where it can."""
    if shutil.which("cc") is None:
        return "cc not found; install a C compiler"
    if not Path("/dev/net/tun").exists():
        return "/dev/net/tun is missing; load the kernel's module tun"
    return why_no_namespaces()


class SwitchedNodes(Nodes):
    """`size` nodes n1, n2, ...; each has a link of its own to the switch, as fast in both directions.

    Args:
        size: number of nodes.
        bytes_per_s: of a link, in each direction.
        latency_s: of every frame, one way.
    """

    def __init__(self, size: int, bytes_per_s: float, latency_s: float) -> None:
        super().__init__(size)
        self._bytes_per_s, self._latency_s = bytes_per_s, latency_s

    def limit(self, rate: str) -> None:
        """Refuse: the links are as they were made."""
        raise NotImplementedError("make other SwitchedNodes")

    def _make_switch(self, stack: ExitStack) -> None:
        self._make_namespace(stack, "sw")
        program = self.agent.with_name("switch")
        run_tool("cc", "-O2", "-o", str(program), str(_SOURCE))
        command = ["ip", "netns", "exec", self._namespace("sw"), str(program), str(len(self.names))]
        process = subprocess.Popen(
            [*command, f"{self._bytes_per_s:.0f}", f"{1e6 * self._latency_s:.3f}"],
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise SystemExit("the switch did not start: see above")
        os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)

    def _make_interface(self, number: int, name: str) -> None:
        # Taken over by the node's namespace, the device stays open in the switch.
        inside = self._namespace(name)
        run_tool("ip", "-n", self._namespace("sw"), "link", "set", f"port{number}", "name", "eth0",
                 "netns", inside)  # fmt: skip
        run_tool("ip", "-n", inside, "link", "set", "eth0", "address", f"02:00:00:00:00:{number:02x}")
