"""Names from files and folders, made to do harm where they are shown: pages, tables, messages."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from speechdp.cli.inspect import describe
from speechdp.cli.support.console import make_console
from speechdp.errors import ConfigError
from speechdp.report.sweep.report import write_report
from tests.helpers.runs import MadeUpRun, write_run
from tests.helpers.tiny_data import TinySizes, write_tiny_data

SCRIPT = "<script>alert('x')<!--&\"[bold red]"


def test_a_page_shows_hostile_names_as_text(tmp_path: Path) -> None:
    out = tmp_path / f"{SCRIPT.replace('/', '')}"
    settings = {"strategy": SCRIPT, "hosts": [SCRIPT], "command": [SCRIPT], "note": {SCRIPT: SCRIPT}}
    write_run(MadeUpRun("a" + SCRIPT, strategy_name=SCRIPT, settings=settings), out)
    (out / ("a" + SCRIPT) / "metrics.jsonl").write_text(f"{SCRIPT}\n")
    report = write_report(out)
    page = report.html.read_text()
    assert "<script>alert" not in page and "<!--&" not in page
    assert "&lt;script&gt;alert" in page
    output = io.StringIO()
    Console(file=output, width=300).print(report.table)
    assert "[bold red]" in output.getvalue()


def test_consoles_print_names_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    make_console().print("[bold]a[/bold] [link=http://x]b[/link] :warning:")
    assert capsys.readouterr().out.rstrip() == "[bold]a[/bold] [link=http://x]b[/link] :warning:"


def test_inspect_shows_no_terminal_codes_of_data_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = write_tiny_data(tmp_path / "data", TinySizes(train=2, dev=1, test=1, shards=1))
    values = json.loads((dataset.path / "data.json").read_text())
    values["splits"]["\x1b[31m[bold]x"] = values["splits"].pop("dev")
    values["alignment"] = values["split"] = "\x1b]0;title\a"
    (dataset.path / "data.json").write_text(json.dumps(values))
    make_console().print(describe(dataset.open(dataset.path)))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\a" not in shown
    assert "[bold]x" in shown


def test_messages_are_one_line_without_terminal_codes() -> None:
    assert str(ConfigError("a\nb\x1b[31m\udc80é")) == r"a\nb\x1b[31m\udc80é"
