"""Find the batch job that this process is part of, from the variables that batch systems set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: Per batch system: the variable with the job id, the system's name, the variable with the array task, and
#: that variable's values outside an array.
_SYSTEMS = (
    ("SLURM_JOB_ID", "slurm", "SLURM_ARRAY_TASK_ID", ("",)),
    ("LSB_JOBID", "lsf", "LSB_JOBINDEX", ("", "0")),
    ("PBS_JOBID", "pbs", "PBS_ARRAY_INDEX", ("",)),
    ("JOB_ID", "sge", "SGE_TASK_ID", ("", "undefined")),
)
#: Batch systems in which all tasks of an array share the array's job id; in others each task has its own.
_WITH_ONE_NUMBER = ("lsf", "sge")


@dataclass(frozen=True)
class SchedulerJob:
    """A batch job.

    Attributes:
        scheduler: slurm, lsf, pbs or sge.
        job_id: job id in that system.
        task: task of a job array; "" outside an array.
        restarts: number of earlier starts.  LSF and Grid Engine tell only whether there was one, PBS not even
            that.
    """

    scheduler: str
    job_id: str
    task: str = ""
    restarts: int = 0

    def is_later_start_of(self, other: SchedulerJob) -> bool:
        """Return whether the scheduler requeued `other` and then started it again as this job."""
        same = (self.scheduler, self.job_id, self.task) == (other.scheduler, other.job_id, other.task)
        return same and self.restarts > other.restarts

    @property
    def task_variable(self) -> str:
        """Name of the variable with the array task; "": this job is not part of an array."""
        if not self.task:
            return ""
        return next((variable for _, name, variable, _ in _SYSTEMS if name == self.scheduler), "")

    def __str__(self) -> str:
        task = f"[{self.task}]" if self.task and self.scheduler in _WITH_ONE_NUMBER else ""
        return f"{self.scheduler} job {self.job_id}{task}"


def find_batch_job(environment: Mapping[str, str]) -> SchedulerJob | None:
    """Return the batch job that a process with this environment is part of; None: there is none."""
    for variable, scheduler, task_variable, none in _SYSTEMS:
        job_id = environment.get(variable)
        # Other programs might also set Grid Engine's variable, whose name is so general.
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
