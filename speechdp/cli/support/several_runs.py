"""Shared by commands that make several runs: what they refuse before the first one, and how they end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from speechdp import exit_codes
from speechdp.process.notices import print_message

if TYPE_CHECKING:
    from speechdp.options.run import TrainOptions
    from speechdp.ownership.overwrite import FolderKind
    from speechdp.tasks.metrics import TaskRecord
    from speechdp.train.session import Session


def check_new(options: TrainOptions, out: Path, kind: FolderKind) -> None:
    """Refuse options without effect, unless OUT continues work that an earlier version began with them.

    Raises:
        ConfigError: an option has no effect.
    """
    if not (out / kind.record).is_file():
        options.check_warmup()


def check_target(target: float | None, task: TaskRecord) -> None:
    """Refuse a target that no run can reach, before any run is trained.  Raises ConfigError.

    Args:
        target: value of the task's first metric, as reports show it; None: not given.
        task: the task's record, or its substitute in runs of a script.
    """
    if target is not None:
        from speechdp.report.kit.metric_names import Terms  # noqa: PLC0415 - matplotlib, which few wait for

        Terms(task).score_of_target(target)


def check_training(data: Path, options: TrainOptions, out: Path, *, on_this_machine: bool) -> None:
    """Refuse a training that its ranks would refuse, before the output folder is emptied.

    The ranks still check whatever depends on their number, on a strategy, or on devices of other hosts.

    Args:
        out: folder to be emptied.
        on_this_machine: the ranks will run on this machine.

    Raises:
        ConfigError, ShardError: options that do not fit the data or the devices.
    """
    import torch  # noqa: PLC0415 - keeps --help fast

    from speechdp.comm.device import ranks_on_gpus  # noqa: PLC0415
    from speechdp.comm.serial import SerialCommunicator  # noqa: PLC0415
    from speechdp.data.shards.dataset import Dataset  # noqa: PLC0415
    from speechdp.experiments.compare.plan import SEQUENTIAL  # noqa: PLC0415
    from speechdp.train.build import check_shards  # noqa: PLC0415
    from speechdp.train.realign import check_overwriting  # noqa: PLC0415
    from speechdp.train.session import Session  # noqa: PLC0415

    shared = dataclasses.replace(options, strategy=SEQUENTIAL, faults=type(options.faults)())
    on_gpu = on_this_machine and ranks_on_gpus(options.device) > 0
    if not on_this_machine:
        loading = dataclasses.replace(options.loading, preprocess_on="cpu")
        shared = dataclasses.replace(shared, loading=loading)
    if on_gpu or not on_this_machine:
        # Trying a number format on a GPU would leave this process holding GPU memory while the ranks run.
        shared = dataclasses.replace(shared, precision="fp32")
    device = torch.device("cuda" if on_gpu else "cpu")
    session = Session(Dataset.open(data), SerialCommunicator(), device)
    check_overwriting(session, shared, out)
    check_shards(session, shared)


def check_precision(data: Path, options: TrainOptions, *, on_this_machine: bool) -> None:
    """Refuse a number format that no rank could compute in, as `train` would, before any job starts.

    Checks only CPUs of this machine; the ranks check GPUs and other hosts, as in `check_training`.

    Args:
        on_this_machine: the ranks will run on this machine.

    Raises:
        ConfigError, ShardError: a format that the model cannot be computed in, or data that do not fit it.
    """
    if options.precision == "fp32" or not on_this_machine:
        return
    import torch  # noqa: PLC0415 - keeps --help fast

    from speechdp.comm.device import ranks_on_gpus  # noqa: PLC0415
    from speechdp.comm.serial import SerialCommunicator  # noqa: PLC0415
    from speechdp.data.shards.dataset import Dataset  # noqa: PLC0415
    from speechdp.train import models  # noqa: PLC0415
    from speechdp.train.session import Session  # noqa: PLC0415

    if ranks_on_gpus(options.device) == 0:
        session = Session(Dataset.open(data), SerialCommunicator(), torch.device("cpu"))
        models.check_precision(session, options)


def until_stopped(out: Path, print_line: Callable[[str], None], work: Callable[[], int]) -> int:
    """Do the work in OUT, including its report; return its exit code, or that of a requested stop.

    Args:
        out: folder that the command writes.
        print_line: prints a line of progress.
        work: does the work; a signal may stop it at any time, and what it has finished is kept.
    """
    from speechdp.experiments.jobs import JobStopped, stops_between_jobs  # noqa: PLC0415 - keeps --help fast

    try:
        with stops_between_jobs():
            return work()
    except JobStopped:
        print_line(f"stopped as requested; the same command continues {out}")
        return exit_codes.STOPPED


def race_until_stopped(session: Session, race: Callable[[], None]) -> int:
    """Hold a race on the ranks of a job; return its exit code: that of a requested stop, else 0."""
    from speechdp.process.ending import Stopped  # noqa: PLC0415 - keeps --help fast

    try:
        race()
    except Stopped:
        session.reporter.notice("stopped as requested; the race will start again from its beginning")
        return exit_codes.STOPPED
    return 0


def report_failures(failed: int, runs: int, logs: Path | None, what: str = "runs") -> None:
    """Print how many runs failed and where to look, if any did.

    Args:
        logs: folder with the output of the runs; None: they were not separate jobs.
    """
    if failed:
        output = "" if logs is None else f", their output in {logs}"
        print_message(
            f"{failed} of {runs} {what} failed; their messages are above{output}; the same command tries "
            "them again"
        )
