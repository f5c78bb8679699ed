"""Which batch job this process is part of, from the variables that batch systems set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: Variable with the number of a job, the batch system, and variables with the task of an array.
_SYSTEMS = (
    ("SLURM_JOB_ID", "slurm", ""),
    ("LSB_JOBID", "lsf", "LSB_JOBINDEX"),
    ("PBS_JOBID", "pbs", ""),
    ("JOB_ID", "sge", "SGE_TASK_ID"),
)
_NO_TASK = ("", "0", "undefined")


@dataclass(frozen=True)
class SchedulerJob:
    """A batch job.

    Attributes:
        scheduler: slurm, lsf, pbs or sge.
        job_id: its number there.
        task: of an array of jobs, which share a number; "" in others.
        restarts: how often it was started before.  LSF and Grid Engine only tell whether, PBS not even that.
    """

    scheduler: str
    job_id: str
    task: str = ""
    restarts: int = 0

    def is_later_start_of(self, other: SchedulerJob) -> bool:
        """Tell whether the scheduler has put `other` back into its queue, and this is what came of it."""
        same = (self.scheduler, self.job_id, self.task) == (other.scheduler, other.job_id, other.task)
        return same and self.restarts > other.restarts

    def __str__(self) -> str:
        return f"{self.scheduler} job {self.job_id}{f'[{self.task}]' if self.task else ''}"


def find_batch_job(environment: Mapping[str, str]) -> SchedulerJob | None:
    """Return the batch job that a process with this environment is part of; None: it is part of none."""
    for variable, scheduler, task_variable in _SYSTEMS:
        job_id = environment.get(variable)
        # Only Grid Engine's name is one that others might use as well.
        if job_id and (scheduler != "sge" or "SGE_ROOT" in environment or "SGE_TASK_ID" in environment):
            task = environment.get(task_variable, "")
            return SchedulerJob(scheduler, job_id, "" if task in _NO_TASK else task, _restarts(environment))
    return None


def _restarts(environment: Mapping[str, str]) -> int:
    count = environment.get("SLURM_RESTART_COUNT", "")
    if count.isascii() and count.isdigit():
        return int(count)
    is_lsf_again = environment.get("LSB_RESTART", "").lower() in ("y", "yes")
    return int(is_lsf_again or environment.get("RESTARTED") in ("1", "2"))
