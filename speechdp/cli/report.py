"""`speechdp report OUT`: table and pictures of a run, a sweep, a comparison or a profile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from speechdp.errors import ConfigError
from speechdp.options.shown import shown

if TYPE_CHECKING:
    from speechdp.report.kit.pages import WrittenReport


@dataclass(frozen=True)
class ReportCommand:
    """Print the results of a run, sweep, comparison, search or profile; write CSV, PNG and an HTML page."""

    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """Folder of a run, of several runs, or of a sweep, comparison, search or profile.
    The report is written to its sub-folder `report` (of a comparison `compare`, of a search `tune`)."""

    target: Annotated[
        float | None,
        shown(
            "VALUE",
            "the best value that all runs reached; in a comparison three quarters of them",
        ),
    ] = None
    """Report the time each run took to reach this held-out value.
    A log-probability in nats per frame; for synthesis models an L1 error; for runs of a script its metric."""
    metric: Annotated[str, shown("NAME[:min|:max]", "the value that the script logged last")] = ""
    """Only for runs of a script: value passed to run.log() by which runs are ranked, e.g. valid_loss:min."""

    def run(self) -> int:
        """Write the report; print its table, its answer and its path."""
        print_report(self.out, self.target, self.metric)
        return 0


def print_report(out: Path, target: float | None, metric: str = "") -> None:
    """Write the report of a folder; print its table, its answer and its path."""
    show_report(_write(out, target, metric))


def show_report(report: WrittenReport) -> None:
    """Print the table, the answer and the paths of a report."""
    from rich.text import Text  # noqa: PLC0415 (keeps `speechdp --help` fast)

    from speechdp.cli.support.console import make_console  # noqa: PLC0415

    console = make_console()
    console.print(report.table, crop=False)
    for sentence in report.answer:
        console.print(Text(sentence))
    for path in (report.html, report.csv, report.png):
        if path is not None:
            console.print(Text(str(path)), soft_wrap=True)


def _write(out: Path, target: float | None, metric: str) -> WrittenReport:
    """Write the report of a folder, according to its contents."""
    from speechdp.experiments.compare import record as comparison  # noqa: PLC0415
    from speechdp.experiments.profile import record as profile  # noqa: PLC0415
    from speechdp.experiments.tune import record as search  # noqa: PLC0415
    from speechdp.report.compare.report import write_comparison  # noqa: PLC0415
    from speechdp.report.sweep.report import write_report  # noqa: PLC0415

    if (out / profile.FILE_NAME).is_file():
        from speechdp.report.profile.page import write_profile_page  # noqa: PLC0415

        if target is not None:
            raise ConfigError(f"--target: {out} is a profile, which has no held-out values; leave it out")
        if metric:
            raise ConfigError(f"--metric: {out} is a profile, which has no held-out values; leave it out")
        return write_profile_page(out)
    if (out / search.FILE_NAME).is_file():
        from speechdp.report.tune.report import write_search  # noqa: PLC0415

        for name, given in (("--target", target is not None), ("--metric", bool(metric))):
            if given:
                raise ConfigError(f"{name}: {out} is a search, which was made for one target; leave it out")
        return write_search(out)
    is_comparison = (out / comparison.FILE_NAME).is_file()
    return (write_comparison if is_comparison else write_report)(out, target, metric)
