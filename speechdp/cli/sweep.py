"""`speechdp sweep`: which averaging period gives which throughput at which accuracy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from speechdp import exit_codes
from speechdp.errors import ConfigError
from speechdp.options.run import TrainOptions

if TYPE_CHECKING:
    from speechdp.comm.base import Communicator
    from speechdp.experiments.sweep import SweepPlan
    from speechdp.train.progress import Reporter
    from speechdp.train.session import Session


@dataclass(frozen=True)
class SweepCommand:
    """Train once for each averaging period and report: speechdp launch -np 2 -- sweep DATA OUT."""

    data: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """Data directory that `speechdp prepare` wrote."""
    out_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder for the runs and the report.  Runs finished there are kept, interrupted ones go on."""
    options: TrainOptions = field(default_factory=TrainOptions)
    periods: str = "1,4,16,64"
    """Averaging periods, separated by commas: steps (16), frames a rank (600kf) or seconds (5s)."""
    swept: str = "model_averaging"
    """Strategy whose period is swept, with its other options, e.g. model_averaging:momentum=average."""
    reference: str = "gradient_averaging"
    """Strategy trained beside them for comparison (--strategy is not used here); empty for none."""
    one_rank_steps: int = 200
    """Steps of the run on one rank that the speed-up refers to; 0: none."""
    decode_split: str = "test"
    """Split whose word error rate is reported; empty for none.  Synthesis has none."""
    target: float | None = None
    """Held-out log-probability whose time is reported; default: the highest that every run reached."""
    overwrite: bool = False
    """Delete the sweep that is in OUT and start anew."""

    def run(self) -> int:
        """Run the sweep; return the exit code."""
        from speechdp.cli.support.distributed import SessionRequest, train_over_ranks  # noqa: PLC0415 - fast --help

        if self.options.strategy != TrainOptions().strategy:
            raise ConfigError("--strategy is not for sweep: use --swept, --periods and --reference")
        sweep = [self.swept, self.periods, self.reference, self.one_rank_steps, self.decode_split]
        others = {"OUT folder": self.out_dir, "sweep": sweep, "--overwrite": self.overwrite}
        request = SessionRequest(self.data, self.options, self.out_dir.name, others)
        return train_over_ranks(request, self._on_rank)

    def _plan(self) -> SweepPlan:
        from speechdp.experiments.sweep import SweepPlan  # noqa: PLC0415

        plan = SweepPlan(
            strategy=self.swept,
            periods=tuple(filter(None, self.periods.split(","))),
            reference=tuple(filter(None, [self.reference])),
            one_rank_steps=self.one_rank_steps,
            decode_split=self.options.to_decode(self.decode_split),
        )
        plan.runs()
        return plan

    def _on_rank(self, session: Session) -> int:
        from speechdp.cli.report import print_report  # noqa: PLC0415
        from speechdp.cli.train import RUN_RECORDS, check_run_overwrite  # noqa: PLC0415
        from speechdp.experiments.sweep import run_sweep  # noqa: PLC0415
        from speechdp.ownership.overwrite import empty  # noqa: PLC0415
        from speechdp.process.ending import Stopped, StoppedBefore  # noqa: PLC0415
        from speechdp.train.ownership import owned  # noqa: PLC0415

        comm, plan = session.comm, self._plan()
        if comm.rank == 0 and self.overwrite:
            check_run_overwrite(self.out_dir)
        try:
            with owned(session, self.out_dir, "sweep") as owner:
                if owner is not None and self.overwrite:
                    empty(owner, RUN_RECORDS)
                comm.barrier()
                run_sweep(session, self.options, plan, self.out_dir, self._reporter_maker(comm))
        except Stopped as stop:
            if isinstance(stop, StoppedBefore) and stop.folder == self.out_dir:
                text = f"stopped as asked before it began; give the same command again: {self.out_dir}"
            else:
                text = f"stopped as asked; the same command goes on with {self.out_dir}"
            session.reporter.notice(text)
            return exit_codes.STOPPED
        if comm.rank == 0:
            print_report(self.out_dir, self.target)
        return 0

    def _reporter_maker(self, comm: Communicator) -> Callable[[str], Reporter]:
        from speechdp.cli.support.console import make_console  # noqa: PLC0415
        from speechdp.train.progress import ConsoleReporter, SilentReporter  # noqa: PLC0415

        if comm.rank != 0:
            return lambda name: SilentReporter()
        console = make_console()
        return lambda name: ConsoleReporter(console, name, self.options.task)
