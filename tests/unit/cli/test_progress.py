"""Progress of a long command where standard error is no terminal."""

from __future__ import annotations

import io

from rich.console import Console

from speechdp.cli.support.progress import progress_bar


def test_each_stage_ends_with_all_of_it() -> None:
    out = io.StringIO()
    with progress_bar(Console(file=out)) as progress:
        for stage in ("reading headers", "reading audio"):
            for done in (0, 1, 292, 293, 293):
                progress(stage, done, 293)
    assert out.getvalue().splitlines() == [
        "reading headers: 0 of 293",
        "reading headers: 293 of 293",
        "reading audio: 0 of 293",
        "reading audio: 293 of 293",
    ]
