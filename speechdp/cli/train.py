"""`speechdp train`: train a model data-parallel over the ranks it is started with."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from speechdp import exit_codes
from speechdp.config import TrainOptions
from speechdp.errors import ConfigError

if TYPE_CHECKING:
    from speechdp.train.session import Session


@dataclass(frozen=True)
class TrainCommand:
    """Train an acoustic or (--task synthesis) a synthesis model: speechdp launch -np 2 -- train DATA RUN."""

    data: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """Data directory that `speechdp prepare` wrote."""
    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder for the run: model, metrics, timing, checkpoints."""
    options: TrainOptions = field(default_factory=TrainOptions)
    resume: bool = False
    """Go on from the last checkpoint in RUN, if there is one."""
    overwrite: bool = False
    """Delete the run that is in RUN and start anew."""

    def run(self) -> int:
        """Train; return the exit code."""
        from speechdp.cli.distributed import SessionRequest, train_over_ranks  # noqa: PLC0415 - fast --help
        from speechdp.comm.environment import expect_rare_exchanges  # noqa: PLC0415
        from speechdp.strategies import parse_strategy  # noqa: PLC0415

        if self.resume and self.overwrite:
            raise ConfigError("--resume and --overwrite exclude each other")
        if not parse_strategy(self.options.strategy).exchanges_every_step:
            expect_rare_exchanges()
        others = {"RUN folder": self.run_dir, "--resume": self.resume, "--overwrite": self.overwrite}
        request = SessionRequest(self.data, self.options, self.run_dir.name, others)
        return train_over_ranks(request, self._on_rank)

    def _on_rank(self, session: Session) -> int:
        from speechdp.ending import Stopped  # noqa: PLC0415
        from speechdp.train.realign import train_with_realignment  # noqa: PLC0415

        if session.comm.rank == 0 and self.overwrite:
            remove_run(self.run_dir)
        session.comm.barrier()
        try:
            train_with_realignment(session, self.options, self.run_dir, resume=self.resume)
        except Stopped:
            session.reporter.end()
            session.reporter.notice(
                f"stopped as asked; the same command with --resume goes on: {self.run_dir}"
            )
            return exit_codes.STOPPED
        session.reporter.notice(f"model: {self.run_dir / 'model.safetensors'}")
        return 0


def remove_run(run_dir: Path) -> None:
    """Delete a run's folder.

    Raises:
        ConfigError: the folder holds something that is not a run.
    """
    if not run_dir.exists():
        return
    # Until its rounds of realignment are done, a run has only theirs.
    if not any(next(run_dir.glob(name), None) for name in ("run.json", "sweep.json", "realign/*/run.json")):
        raise ConfigError(f"{run_dir}: --overwrite deletes only folders that hold a run; remove it yourself")
    shutil.rmtree(run_dir)
