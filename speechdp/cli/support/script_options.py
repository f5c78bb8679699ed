"""Options that `compare --script` and `sweep --script` share: what to run, where, and how to judge it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from speechdp.errors import ConfigError
from speechdp.options.shown import shown

if TYPE_CHECKING:
    from speechdp.experiments.compare.script_training import UserScript
    from speechdp.experiments.jobs import JobStarter
    from speechdp.ownership.overwrite import FolderKind


@dataclass(frozen=True)
class ScriptOptions:
    """Your training script, and where it runs."""

    script: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """Python script that trains with speechdp.DataParallel (docs/api.md).
    It is run unchanged; arguments after `--` are passed to it, with {seed} replaced by the seed."""
    metric: Annotated[str, shown("NAME[:min|:max]", "the value that the script logged last")] = ""
    """Value passed to run.log() by which runs are ranked, e.g. valid_loss:min or accuracy:max.
    min: lower is better; max: higher is better.
    Without :min or :max the name decides: higher is better for accuracy, auc, bleu, f1, score, ..."""
    backend: Literal["auto", "horovod", "mpi", "torch", "threads"] = "auto"
    """Library the ranks communicate with.
    auto: horovod if installed, else mpi; torch: torch.distributed; threads: ranks are threads, for trials."""
    hostfile: Annotated[Path | None, shown("FILE", "this machine only")] = None
    """File with a line `host slots=N` for each host."""
    launch_args: Annotated[str, shown("'OPTIONS'", "none")] = ""
    """More options for `speechdp launch`, quoted as one argument: "--launcher horovodrun"."""
    threads: Annotated[int | None, shown("N", "cores / largest number of ranks, at least 1")] = None
    """CPU threads of each rank, the same in all runs."""
    target: Annotated[
        float | None,
        shown("VALUE", "the best value that all runs reached; in a comparison three quarters of them"),
    ] = None
    """Report the time each run took to reach this value of the metric."""

    def check(self) -> None:
        """Refuse what no run could do anything with.  Raises ConfigError."""
        from speechdp.report.runs.script_metric import parse_metric  # noqa: PLC0415 - keeps --help fast

        if not self.script.is_file():
            raise ConfigError(f"--script {self.script}: no such file")
        if self.metric:
            parse_metric(self.metric)

    def user_script(self, arguments: Sequence[str]) -> UserScript:
        """Return the script with its arguments."""
        from speechdp.experiments.compare.script_training import UserScript  # noqa: PLC0415

        return UserScript(self.script, tuple(arguments), self.backend)

    def starter(self, command: str, most_ranks: int, threads_before: int | None = None) -> JobStarter:
        """Return what starts the script.

        Args:
            command: of the user, for messages.
            most_ranks: of any run.
            threads_before: of a rank of the finished runs that are kept; None: there are none.
        """
        from speechdp.cli.support.starting import make_starter, threads_of_a_rank  # noqa: PLC0415

        threads = threads_of_a_rank(self.threads, most_ranks, self.hostfile, threads_before)
        return make_starter(command, self.launch_args, self.hostfile, threads)


def say_how_many_failed(failed: int, runs: int, out: Path, what: str = "runs") -> None:
    """Print where to look, if any run failed."""
    if failed:
        print(
            f"speechdp: {failed} of {runs} {what} failed; their messages are above, "
            f"their output in {out / 'logs'}; the same command tries them again",
            file=sys.stderr,
        )


@contextmanager
def owned_folder(
    out: Path, command: str, say: Callable[[str], None], kind: FolderKind, *, overwrite: bool
) -> Iterator[None]:
    """Own a folder for the block, emptied before if asked.

    Args:
        command: of the user, for messages.
        say: takes a line of news.
        kind: what the command writes.
        overwrite: delete what is in it.

    Raises:
        ConfigError: it is a folder of another command, or must not be overwritten.
    """
    from speechdp.comm.startup.folder_owner import owner_of  # noqa: PLC0415
    from speechdp.ownership.overwrite import check_kind, check_overwrite, empty  # noqa: PLC0415

    (check_overwrite if overwrite else check_kind)(out, kind)
    with owner_of(out, command, say) as owner:
        if overwrite and (stays := empty(owner, kind)):
            say(stays)
        yield
