"""A real Slurm over the nodes of a lab: munged and slurmd on each, slurmctld on the first."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.cluster.batch import BatchJob, submitted, wait_until
from tests.cluster.lab import Lab
from tests.helpers.mpi import Ended

#: Debian's package of each program needed.
_PROGRAMS = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm", "munged": "munge"}
_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
#: Slurm's plugin loads PMIx by the name that only the package for developers has.
_PMIX = ("libpmix.so", "libpmix-dev")
_RUNNING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED", "STOPPED")

_SETTINGS = {
    "ClusterName": "lab",
    "SlurmUser": "root",
    "SlurmdUser": "root",
    "AuthType": "auth/munge",
    "SlurmctldPidFile": "/run/slurmctld.pid",
    "SlurmdPidFile": "/run/slurmd.pid",
    "SlurmdSpoolDir": "/run/slurmd",
    # Nothing of the machine's control groups, of which it may have none.
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "JobAcctGatherType": "jobacct_gather/none",
    "AccountingStorageType": "accounting_storage/none",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core",
    # Jobs start at once instead of after up to a minute.
    "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,bf_interval=1",
    # More cores than the machine has, so that two jobs fit on a node.
    "SlurmdParameters": "config_overrides",
    "ReturnToService": "2",
    # As clusters have it that know nothing of PMIx: srun needs --mpi=pmix.
    "MpiDefault": "none",
    # A lost node is given up after so many seconds; the smallest that does not misjudge a busy machine.
    "SlurmdTimeout": "15",
    "KillWait": "2",
    "MinJobAge": "3600",
}
#: Nodes refuse a job that starts again in the second in which it was ended.
_REQUEUE_S = 3
_START_MUNGED = """\
mkdir -p /etc/slurm /run/munge /run/slurmd
chmod 755 /run/munge
cp "$1"/*.conf /etc/slurm
exec munged --force --key-file="$1"/munge.key --socket=/run/munge/munge.socket.2 \
    --pid-file=/run/munge/munged.pid --log-file="$1/munged-$2.log" --seed-file=/run/munge/seed
"""
_STOP = """\
for name in slurmctld slurmd munge/munged; do
    if [ -f /run/$name.pid ]; then kill -KILL "$(cat /run/$name.pid)" || :; fi
done
"""


def why_not() -> str | None:
    """Return why there is no Slurm to start; None where there is."""
    missing = {package for program, package in _PROGRAMS.items() if not shutil.which(program, path=_PATH)}
    libraries = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False)
    name, package = _PMIX
    if f"/{name}\n" not in libraries.stdout:
        missing.add(package)
    if not missing:
        return None
    return f"no Slurm here; apt-get install --no-install-recommends {' '.join(sorted(missing))}"


class Slurm:
    """Slurm's daemons on all nodes of a lab; a context manager.

    Args:
        lab: nodes that are up.
        cpus: of each node, as Slurm is to believe.
    """

    def __init__(self, lab: Lab, cpus: int = 2) -> None:
        self.lab = lab
        self._cpus = cpus
        self._master = lab.names[0]
        self.folder = lab.folder / "slurm"

    def __enter__(self) -> Slurm:
        with ExitStack() as stack:  # what fails half-way is taken down again
            stack.callback(self._stop)
            self._write_files()
            for name in self.lab.names:
                self._start_munged(name)
            self._must(self._master, ["slurmctld"])
            for name in self.lab.names:
                self._must(name, ["slurmd", "-N", name])
            wait_until(self._all_idle, "idle nodes", self._explain)
            stack.pop_all()
        return self

    def join(self, name: str) -> None:
        """Take a node in again that was killed and is up again."""
        self._start_munged(name)
        self._must(name, ["slurmd", "-N", name])
        wait_until(self._all_idle, "idle nodes", self._explain)

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def command(self, *argv: str | Path) -> Ended:
        """Run one of Slurm's commands on the first node."""
        return self.lab.on(self._master, argv)

    def submit(self, argv: Sequence[str | Path], env: Mapping[str, str] | None = None) -> str:
        """Run a command that submits (sbatch, speechdp submit) on the first node; return the job id."""
        return submitted(self.lab, argv, env)

    def show(self, job_id: str) -> BatchJob:
        """Return what Slurm says of a job."""
        text = self._must(self._master, ["scontrol", "show", "job", job_id])
        words = dict(re.findall(r"(?m)(?:^ *| )(JobState|Restarts|ExitCode|NodeList|Reason)=(\S+)", text))
        exit_code, signal = (int(number) for number in words["ExitCode"].split(":"))
        state = words["JobState"]
        code = None if state in _RUNNING else exit_code or (128 + signal if signal else 0)
        return BatchJob(job_id, state, code, int(words["Restarts"]), words.get("NodeList", ""))

    def reason(self, job_id: str) -> str:
        """Return why a job waits."""
        return self._must(self._master, ["squeue", "-h", "-t", "all", "-j", job_id, "-o", "%r"]).strip()

    def output(self, job_id: str) -> str:
        """Return what a job has printed so far."""
        text = self._must(self._master, ["scontrol", "show", "job", job_id])
        found = re.search(r"(?m)^ *StdOut=(.*)$", text)
        if found is None or not Path(found[1]).is_file():
            return f"(no output of job {job_id}: {text})"
        return Path(found[1]).read_text(errors="replace")

    def wait(self, job_id: str) -> BatchJob:
        """Wait for the end of a job; on a time-out cancel it and fail."""
        self.wait_until(job_id, lambda job: job.exit_code is not None, "the end")
        return self.show(job_id)

    def wait_until(self, job_id: str, condition: Callable[[BatchJob], object], what: str) -> None:
        """Wait until a condition, given the job, has come true; on a time-out cancel the job and fail."""

        def explain() -> str:
            job, said = self.show(job_id), self.output(job_id)
            self.command("scancel", job_id)
            return f"{job}\n{said}\n{self._explain()}"

        wait_until(lambda: condition(self.show(job_id)), f"{what} of job {job_id}", explain)

    def signal_script(self, job_id: str, name: str) -> None:
        """Send a signal to a job's script alone, as `sbatch --signal=B:NAME@TIME` does."""
        self._must(self._master, ["scancel", "--batch", f"--signal={name}", job_id])

    def start_now(self, job_id: str) -> None:
        """Start a job that was put back into the queue soon, not after two minutes as Slurm would."""
        self.wait_until(job_id, lambda job: job.state == "PENDING" and job.restarts > 0, "the requeue")
        self._must(self._master, ["scontrol", "update", f"jobid={job_id}", f"starttime=now+{_REQUEUE_S}"])

    def _start_munged(self, name: str) -> None:
        self._must(name, ["sh", "-euc", _START_MUNGED, "sh", self.folder, name])

    def _write_files(self) -> None:
        (self.folder / "state").mkdir(parents=True, exist_ok=True)
        settings = {
            **_SETTINGS,
            "SlurmctldHost": f"{self._master}({self.lab.address(self._master)})",
            "StateSaveLocation": str(self.folder / "state"),
            "SlurmctldLogFile": str(self.folder / "slurmctld.log"),
            "SlurmdLogFile": str(self.folder / "slurmd-%n.log"),
        }
        lines = [f"{name}={value}" for name, value in settings.items()]
        for name in self.lab.names:
            # Jobs rather go where slurmctld is not, so that the node they began on can be lost.
            weight = 10 if name == self._master else 1
            lines.append(f"NodeName={name} CPUs={self._cpus} RealMemory=2000 Weight={weight} State=UNKNOWN")
        lines.append("PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
        (self.folder / "slurm.conf").write_text("\n".join([*lines, ""]))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)

    def _all_idle(self) -> bool:
        ended = self.command("sinfo", "-h", "-N", "-o", "%T")
        return ended.stdout.split() == ["idle"] * len(self.lab.names)

    def _must(self, name: str, argv: Sequence[str | Path]) -> str:
        ended = self.lab.on(name, argv, env={"PATH": _PATH})
        assert ended.exit_code == 0, f"{argv}: {ended.output}"
        return ended.stdout

    def _stop(self) -> None:
        for name in self.lab.names:
            self.lab.on(name, ["sh", "-c", _STOP])  # of a node that is gone there is nothing to stop

    def _explain(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)
