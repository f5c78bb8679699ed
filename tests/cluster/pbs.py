"""A real PBS over the nodes of a lab: pbs_mom on each, server, scheduler and database on the first.

OpenPBS, of which there is no package of Debian's, built from source for /opt/pbs.  Its mom sees no process of
root's, as whom the lab's jobs run: `sbuf.st_uid == 0` in src/resmom/linux/mom_mach.c has to be taken out.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.cluster.batch import BatchJob, WaitsForJobs, submitted, wait_until
from tests.cluster.lab import Lab
from tests.helpers.mpi import Ended

_EXEC = Path("/opt/pbs")
#: Each node's own, as all of /etc and /var/spool.
_CONFIG = """\
PBS_EXEC=/opt/pbs
PBS_HOME=/var/spool/pbs
PBS_SERVER={master}
PBS_START_SERVER={starts}
PBS_START_SCHED={starts}
PBS_START_COMM={starts}
PBS_START_MOM=1
PBS_SCP=/usr/bin/scp
PBS_CORE_LIMIT=unlimited
"""
# Jobs of root, who alone can bring up nodes; soon, and nothing is sent by mail.
_SETTINGS = """\
set server acl_roots = root
set server managers = root@*
set server flatuid = true
set server job_history_enable = true
set server mail_from = none
set sched scheduler_iteration = 5
set queue workq kill_delay = 120
"""
# The database's socket stands in /run, which is the node's.
_PREPARE = """\
printf %s "$1" >/etc/pbs.conf
mkdir -p /run/postgresql
chown postgres /run/postgresql
"""
_STOP = """\
pids=$(pidof pbs_mom pbs_sched pbs_server.bin pbs_comm pbs_ds_monitor postgres) && kill -KILL $pids
"""


def why_not() -> str | None:
    """Return why there is no PBS to start; None where there is."""
    if not (_EXEC / "sbin" / "pbs_server").exists():
        return f"no PBS here: OpenPBS, built and installed in {_EXEC} (it needs postgresql)"
    return None if shutil.which("psql") else "no database for PBS here; apt-get install postgresql"


class Pbs(WaitsForJobs):
    """PBS's daemons on all nodes of a lab.

    Args:
        lab: nodes that are up.
        cores: of each node.
    """

    def __init__(self, lab: Lab, cores: int = 2) -> None:
        self.lab = lab
        self._cores = cores
        self._master = lab.names[0]

    def __enter__(self) -> Pbs:
        with ExitStack() as stack:  # what fails half-way is taken down again
            stack.callback(self._stop)
            for name in self.lab.names:
                text = _CONFIG.format(master=self._master, starts=int(name == self._master))
                self._must(name, ["sh", "-euc", _PREPARE, "sh", text])
                self._must(name, [_EXEC / "libexec" / "pbs_init.d", "start"])
            wait_until(lambda: self.command("qstat", "-B").exit_code == 0, "pbs_server", self._explain)
            # The first is known to the server it runs on.
            nodes = [f"create node {name}" for name in self.lab.names[1:]]
            cores = [f"set node {name} resources_available.ncpus={self._cores}" for name in self.lab.names]
            for line in [*_SETTINGS.splitlines(), *nodes, *cores]:
                self._must(self._master, [_EXEC / "bin" / "qmgr", "-c", line])
            wait_until(self._all_there, "pbs_mom of every node", self._explain)
            stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def command(self, program: str, *argv: str | Path) -> Ended:
        """Run one of PBS's commands on the first node."""
        return self.lab.on(self._master, [_EXEC / "bin" / program, *argv])

    def submit(self, argv: Sequence[str | Path]) -> str:
        """Run a command that submits (qsub, speechdp submit) on the first node; return the job id."""
        return submitted(self.lab, argv, {"PATH": f"{_EXEC / 'bin'}:{os.environ['PATH']}"})

    def show(self, job_id: str) -> BatchJob:
        """Return what PBS says of a job, an ended one too."""
        text = self._must(self._master, [_EXEC / "bin" / "qstat", "-x", "-f", job_id]).replace("\n\t", "")
        words = dict(re.findall(r"(?m)^ +(job_state|Exit_status|run_count|exec_host) = (\S+)", text))
        code = int(words["Exit_status"]) if words["job_state"] == "F" else None
        restarts = max(int(words.get("run_count", "1")) - 1, 0)
        return BatchJob(job_id, words["job_state"], code, restarts, words.get("exec_host", ""))

    def _cancel(self, job_id: str) -> str:
        why = self.command("qstat", "-x", "-f", job_id).stdout
        self.command("qdel", "-W", "force", job_id)
        return f"{why}\n{self._explain()}"

    def _all_there(self) -> bool:
        states = re.findall(r"(?m)^ +state = (\S+)", self.command("pbsnodes", "-a").stdout)
        return states == ["free"] * len(self.lab.names)

    def _must(self, name: str, argv: Sequence[str | Path]) -> str:
        ended = self.lab.on(name, argv)
        assert ended.exit_code == 0, f"{argv}: {ended.output}"
        return ended.stdout

    def _stop(self) -> None:
        for name in self.lab.names:  # of a node that is gone there is nothing to stop
            self.lab.on(name, ["sh", "-c", _STOP])

    def _explain(self) -> str:
        return self.command("pbsnodes", "-a").stdout
