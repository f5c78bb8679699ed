"""`speechdp train`: train a model data-parallel over the ranks it is started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from speechdp import exit_codes
from speechdp.cli.support.out_folder import OutFolder, inputs_of, owned_by_ranks
from speechdp.errors import ConfigError, ShardError
from speechdp.options.run import TrainOptions
from speechdp.options.shown import heading, shown
from speechdp.ownership.overwrite import RUN

if TYPE_CHECKING:
    from speechdp.process.ending import Stopped
    from speechdp.train.session import Session


@dataclass(frozen=True)
class TrainCommand:
    """Train a speech recognition or (--task synthesis) text-to-speech model.

    On one rank: speechdp train DATA RUN.  On two: speechdp launch -np 2 -- train DATA RUN."""

    data: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """Data directory written by `speechdp prepare`."""
    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder to write the run to: model, metrics, timing, checkpoints."""
    options: Annotated[TrainOptions, heading("training")] = field(default_factory=TrainOptions)
    resume: bool = False
    """Continue from the last checkpoint in RUN, if there is one.
    Options that are not given keep the values that RUN was begun with."""
    overwrite: bool = False
    """Delete the run in RUN and start over."""
    pause_at: Annotated[int, shown("STEP", "train to the end")] = 0
    """After this many steps of the run, evaluate, save and exit with code 75; --resume continues.
    Unlike --max-steps, it may differ when the run is resumed."""

    def check(self) -> None:
        """Refuse options that are invalid or exclude each other.  Raises ConfigError."""
        if self.resume and self.overwrite:
            raise ConfigError("--resume and --overwrite exclude each other")
        if self.pause_at < 0:
            raise ConfigError(f"--pause-at {self.pause_at}: must be at least 0")
        self.options.strategy.check_name()

    def check_strategies(self) -> None:
        """Refuse options that the strategy does not take.  Raises ConfigError."""
        _ = self.options.strategy.parsed

    def run(self) -> int:
        """Train; return the exit code."""
        from speechdp.cli.support.distributed import SessionRequest, train_over_ranks  # noqa: PLC0415 - fast --help
        from speechdp.comm.environment import expect_rare_exchanges  # noqa: PLC0415

        self.check()
        if not self.options.strategy.parsed.traits.exchanges_every_step:
            expect_rare_exchanges()
        others = {"RUN folder": self.run_dir, "--resume": self.resume, "--overwrite": self.overwrite}
        others["--pause-at"] = self.pause_at
        label = self.run_dir.absolute().name
        request = SessionRequest(self.data, self.options, label, others, saves_on_interrupt=True)
        return train_over_ranks(request, self._on_rank)

    def _on_rank(self, session: Session) -> int:
        from speechdp.options.targets import warn_of_spread_targets  # noqa: PLC0415
        from speechdp.process.ending import Stopped  # noqa: PLC0415
        from speechdp.train.build import check_shards  # noqa: PLC0415
        from speechdp.train.realign import check_overwriting, train_with_realignment  # noqa: PLC0415

        out = OutFolder(self.run_dir, self.overwrite, inputs_of(self.data, self.options))
        if session.comm.rank == 0:
            out.check(RUN)
        if self.overwrite:
            check_overwriting(session, self.options, self.run_dir)
            check_shards(session, self.options)
        try:
            with owned_by_ranks(session, out, "train", RUN):
                warn_of_spread_targets(self.options, lambda: session.dataset, session.reporter.notice)
                train_with_realignment(
                    session, self.options, self.run_dir, resume=self.resume, pause_at=self.pause_at
                )
        except ShardError as error:
            if not (self.run_dir / "run.json").is_file():
                raise
            # The corrected command alone would be refused: the folder holds a run, but without a checkpoint.
            after = f"afterwards the same command with {self._resume()} continues"
            raise ShardError(f"{error}; {after}") from error
        except KeyboardInterrupt:
            session.reporter.end()
            session.reporter.notice(self._describe_interruption())
            raise
        except Stopped as stop:
            session.reporter.end()
            session.reporter.notice(f"{self._describe_stop(stop)}: {self.run_dir}")
            return exit_codes.STOPPED
        session.reporter.notice(f"model: {self.run_dir / 'model.safetensors'}")
        return 0

    def _describe_interruption(self) -> str:
        """Return a line on what an interrupted run has saved, and how to continue it."""
        from speechdp.launching.outcome import newest_checkpoint  # noqa: PLC0415

        checkpoint = newest_checkpoint(self.run_dir)
        known = (
            f"no checkpoint in {self.run_dir} yet" if checkpoint is None else f"last checkpoint: {checkpoint}"
        )
        return f"{known}; the same command with {self._resume()} continues"

    def _resume(self) -> str:
        """Return the option with which this command continues, to complete "the same command with ..."."""
        return "--resume in place of --overwrite" if self.overwrite else "--resume"

    def _describe_stop(self, stop: Stopped) -> str:
        """Return a line on what stopped the run, and how to continue it."""
        from speechdp.process.ending import STOPPED_BEFORE, Paused, StoppedBefore  # noqa: PLC0415

        if isinstance(stop, StoppedBefore):
            return STOPPED_BEFORE
        resume = self._resume()
        if isinstance(stop, Paused):
            reached = f"stopped as requested: --pause-at {self.pause_at} is reached"
            return f"{reached}; give a later --pause-at, or none, and {resume} to continue"
        return f"stopped as requested; the same command with {resume} continues"
