"""A real Grid Engine over the nodes of a lab: sge_execd on each, sge_qmaster on the first."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.cluster.batch import BatchJob, WaitsForJobs, submitted, wait_until
from tests.cluster.lab import Lab
from tests.helpers.mpi import Ended

#: Debian's package of each program needed.
_PROGRAMS = {
    "/usr/sbin/sge_qmaster": "gridengine-master",
    "/usr/sbin/sge_execd": "gridengine-exec",
    "qsub": "gridengine-client",
}
#: A job that leaves with it is started again.
_AGAIN = "99"
_ROOT = Path("/var/lib/gridengine")
_ENV = {"SGE_ROOT": str(_ROOT), "SGE_CELL": "default"}

_GLOBAL = {
    "execd_spool_dir": "/run/sge_execd",
    # Jobs of root, who alone can bring up nodes.
    "min_uid": "0",
    "min_gid": "0",
    # What a job leaves behind is ended by the group id its processes have.
    "execd_params": "ENABLE_ADDGRP_KILL=true",
    # How a job ended is written at once, not after up to 15 s.
    "reporting_params": "accounting=true reporting=false flush_time=00:00:01 accounting_flush_time=00:00:00 "
    "joblog=false sharelog=00:00:00",
}
_SCHEDULER = {"schedule_interval": "0:0:1", "flush_submit_sec": "1", "flush_finish_sec": "1"}
_HOSTS = {"group_name": "@allhosts"}
_PARALLEL_ENVIRONMENT = {
    "slots": "999", "user_lists": "NONE", "xuser_lists": "NONE", "start_proc_args": "NONE",
    "stop_proc_args": "NONE", "job_is_first_task": "FALSE", "urgency_slots": "min",
    # One record a job, not one for each node.
    "accounting_summary": "TRUE", "qsort_args": "NONE",
}  # fmt: skip
_QUEUE = {
    "qname": "all.q", "hostlist": "@allhosts", "pe_list": "orte smp", "shell": "/bin/bash",
    "shell_start_mode": "unix_behavior",
    # The machine is loaded by much that is none of the nodes'.
    "load_thresholds": "NONE",
}  # fmt: skip

# A copy of the installation's state, so that neither the machine's own nor that of a second lab is touched;
# /var/spool is the node's already.
_PREPARE = """\
mount --bind "$1/root" /var/lib/gridengine
mkdir -p /run/sge_execd
chown sgeadmin /run/sge_execd
"""
_STOP = """\
for name in sge_execd sge_qmaster; do
    pids=$(pidof $name) && kill -KILL $pids
done
umount --lazy /var/lib/gridengine
"""


def why_not() -> str | None:
    """Return why there is no Grid Engine to start; None where there is."""
    missing = {package for program, package in _PROGRAMS.items() if shutil.which(program) is None}
    if not missing and not (_ROOT / "default" / "common" / "bootstrap").is_file():
        missing.add("gridengine-master")  # installed, but not set up
    if not missing:
        return None
    return f"no Grid Engine here; apt-get install --no-install-recommends {' '.join(sorted(missing))}"


class GridEngine(WaitsForJobs):
    """Grid Engine's daemons on all nodes of a lab, a queue and the parallel environments orte and smp.

    Args:
        lab: nodes that are up.
        slots: of each node.
    """

    def __init__(self, lab: Lab, slots: int = 2) -> None:
        self.lab = lab
        self._slots = slots
        self._master = lab.names[0]
        self.folder = lab.folder / "sge"

    def __enter__(self) -> GridEngine:
        with ExitStack() as stack:  # what fails half-way is taken down again
            stack.callback(self._stop)
            self.folder.mkdir()
            subprocess.run(["cp", "-a", _ROOT, self.folder / "root"], check=True)  # with its owners
            (self.folder / "root" / "default" / "common" / "act_qmaster").write_text(f"{self._master}\n")
            for name in self.lab.names:
                self._must(name, ["sh", "-euc", _PREPARE, "sh", self.folder])
            self._must(self._master, ["sge_qmaster"])
            wait_until(lambda: self.command("qconf", "-sh").exit_code == 0, "sge_qmaster", self._explain)
            self._configure()
            for name in self.lab.names:
                self._must(name, ["sge_execd"])
            self._add_queue()
            wait_until(self._all_there, "sge_execd of every node", self._explain)
            stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def command(self, *argv: str | Path) -> Ended:
        """Run one of Grid Engine's commands on the first node."""
        return self.lab.on(self._master, argv, env=_ENV)

    def submit(self, argv: Sequence[str | Path], env: Mapping[str, str] | None = None) -> str:
        """Run a command that submits (qsub, speechdp submit) on the first node; return the job id."""
        return submitted(self.lab, argv, {**_ENV, **(env or {})})

    def show(self, job_id: str) -> BatchJob:
        """Return what Grid Engine says of a job; state "ended" once it is no longer listed."""
        listed = self.command("qstat", "-u", "*").stdout
        found = re.search(rf"(?m)^ *{job_id} +\S+ +\S+ +\S+ +(\S+) +\S+ +\S+ +(\S+@\S+)?", listed)
        if found is not None:
            return BatchJob(job_id, found[1], None, int("R" in found[1]), found[2] or "")
        account = self.command("qacct", "-j", job_id)
        codes = re.findall(r"(?m)^exit_status +(\d+)", account.stdout)
        if not codes or codes[-1] == _AGAIN:
            return BatchJob(job_id, "ending")  # its last end is accounted for a moment later
        return BatchJob(job_id, "ended", int(codes[-1]), len(codes) - 1)

    def suspend(self, job_id: str) -> None:
        """Suspend a job; one submitted with -notify gets SIGUSR1 first, and time to leave by itself."""
        self._must(self._master, ["qmod", "-sj", job_id])

    def _cancel(self, job_id: str) -> str:
        why = self.command("qstat", "-j", job_id).stdout
        self.command("qdel", job_id)
        return f"{why}\n{self._explain()}"

    def _configure(self) -> None:
        for name in self.lab.names:
            for what in ("-ah", "-as"):
                self.command("qconf", what, name)  # fails for what is known already
        self._change("global", _GLOBAL, "-sconf", "-Mconf", "global")
        self._change("scheduler", _SCHEDULER, "-ssconf", "-Msconf")

    def _add_queue(self) -> None:
        self._add("hosts", {**_HOSTS, "hostlist": " ".join(self.lab.names)}, "-Ahgrp")
        for name, rule, tight in (("orte", "$round_robin", "TRUE"), ("smp", "$pe_slots", "FALSE")):
            own = {"pe_name": name, "allocation_rule": rule, "control_slaves": tight}
            self._add(name, {**_PARALLEL_ENVIRONMENT, **own}, "-Ap")
        self._change("queue", {**_QUEUE, "slots": str(self._slots)}, "-sq", "-Aq")

    def _change(self, file: str, changes: Mapping[str, str], show: str, change: str, *which: str) -> None:
        """Change lines `name value` of a configuration, as an editor started by qconf would."""
        text = self._must(self._master, ["qconf", show, *which]).replace("\\\n", " ")
        for name, value in changes.items():
            line = re.search(rf"(?m)^{name}\b.*$", text)
            assert line is not None, f"{name} in\n{text}"
            text = f"{text[: line.start()]}{name} {value}{text[line.end() :]}"
        self._give(file, text, change)

    def _add(self, file: str, lines: Mapping[str, str], add: str) -> None:
        self._give(file, "".join(f"{name} {value}\n" for name, value in lines.items()), add)

    def _give(self, file: str, text: str, option: str) -> None:
        (self.folder / file).write_text(text)
        self._must(self._master, ["qconf", option, self.folder / file])

    def _all_there(self) -> bool:
        """Tell whether every node has reported its load, before which nothing starts on it."""
        lines = re.findall(r"(?m)^all\.q@.*$", self.command("qstat", "-f").stdout)
        return len(lines) == len(self.lab.names) and not any("-NA-" in line for line in lines)

    def _must(self, name: str, argv: Sequence[str | Path]) -> str:
        ended = self.lab.on(name, argv, env=_ENV)
        assert ended.exit_code == 0, f"{argv}: {ended.output}"
        return ended.stdout

    def _stop(self) -> None:
        for name in self.lab.names:
            self.lab.on(name, ["sh", "-c", _STOP])  # of a node that is gone there is nothing to stop

    def _explain(self) -> str:
        queues = self.command("qstat", "-f").stdout
        messages = self.lab.on(self._master, ["cat", "/var/spool/gridengine/qmaster/messages"])
        return f"{queues}\n{messages.stdout[-2000:]}"
