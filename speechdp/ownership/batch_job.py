"""Which batch job this process is part of, from the variables that batch systems set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: Variable with the number of a job, the batch system, the variable with the task of an array, and what that
#: holds in a job that is of none.
_SYSTEMS = (
    ("SLURM_JOB_ID", "slurm", "SLURM_ARRAY_TASK_ID", ("",)),
    ("LSB_JOBID", "lsf", "LSB_JOBINDEX", ("", "0")),
    ("PBS_JOBID", "pbs", "PBS_ARRAY_INDEX", ("",)),
    ("JOB_ID", "sge", "SGE_TASK_ID", ("", "undefined")),
)
#: Batch systems in which the tasks of an array have the number of the array's job; others have one each.
_WITH_ONE_NUMBER = ("lsf", "sge")


@dataclass(frozen=True)
class SchedulerJob:
    """A batch job.

    Attributes:
        scheduler: slurm, lsf, pbs or sge.
        job_id: its number there.
        task: of an array of jobs; "" in others.
        restarts: how often it was started before.  LSF and Grid Engine only tell whether, PBS not even that.
    """

    scheduler: str
    job_id: str
    task: str = ""
    restarts: int = 0

    def is_later_start_of(self, other: SchedulerJob) -> bool:
        """Return whether the scheduler has put `other` back into its queue, and this is what came of it."""
        same = (self.scheduler, self.job_id, self.task) == (other.scheduler, other.job_id, other.task)
        return same and self.restarts > other.restarts

    @property
    def task_variable(self) -> str:
        """Name of the variable that has the task of an array; "": this is of none."""
        if not self.task:
            return ""
        return next((variable for _, name, variable, _ in _SYSTEMS if name == self.scheduler), "")

    def __str__(self) -> str:
        task = f"[{self.task}]" if self.task and self.scheduler in _WITH_ONE_NUMBER else ""
        return f"{self.scheduler} job {self.job_id}{task}"


def find_batch_job(environment: Mapping[str, str]) -> SchedulerJob | None:
    """Return the batch job that a process with this environment is part of; None: it is part of none."""
    for variable, scheduler, task_variable, none in _SYSTEMS:
        job_id = environment.get(variable)
        # Only Grid Engine's name is one that others might use as well.
        if job_id and (scheduler != "sge" or "SGE_ROOT" in environment or "SGE_TASK_ID" in environment):
            task = environment.get(task_variable, "")
            return SchedulerJob(scheduler, job_id, "" if task in none else task, _restarts(environment))
    return None


def _restarts(environment: Mapping[str, str]) -> int:
    count = environment.get("SLURM_RESTART_COUNT", "")
    if count.isascii() and count.isdigit():
        return int(count)
    is_lsf_again = environment.get("LSB_RESTART", "").lower() in ("y", "yes")
    return int(is_lsf_again or environment.get("RESTARTED") in ("1", "2"))
