"""Umlauts in names of files, ids and words do no harm, whatever the locale; see also test_security_names."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import speechdp
from tests.helpers.corpora import write_tone

PACKAGE = Path(speechdp.__file__).parent
PLAIN = {"PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
#: Runs every command of a corpus' way, as the console script would.
COMMANDS = """
import sys
from speechdp.cli import main
from speechdp.process.utf8 import use_utf8

use_utf8()
for number, command in enumerate(map(str.split, sys.argv[1].split(";"))):
    assert main.run(command) == 0, (number, command)
"""


def without_encoding(source: str) -> Iterator[int]:
    """Yield the lines that open text without saying how it is encoded."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
        modes = [getattr(argument, "value", None) for argument in node.args]
        is_text = name in ("read_text", "write_text") or (
            name == "open" and any(isinstance(mode, str) and mode in ("r", "w", "a", "x") for mode in modes)
        )
        if (is_text or given.get("text") is True) and "encoding" not in given:
            yield node.lineno


def test_text_is_opened_as_utf8_everywhere() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in without_encoding(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize("source", ["p.read_text()", "p.open('a')", "open(p, 'w')", "run(a, text=True)"])
def test_text_without_encoding_is_found(source: str) -> None:
    assert list(without_encoding(source)) == [1]


def test_umlauts_from_audio_to_report_in_the_poorest_locale(tmp_path: Path) -> None:
    """C, without the UTF-8 that Python has for it, and nothing but ASCII on standard output."""
    source, data, run = tmp_path / "töne", tmp_path / "däten", tmp_path / "läufe"
    words = ("öffnen", "schließen")
    ids = [f"jürgen_{number:02}" for number in range(12)]
    for number, name in enumerate(ids):
        write_tone(source / "Müller" / f"{name}.wav", 0.3, seed=number)
    lines = {
        "text": [f"{name} {words[number % 2]}" for number, name in enumerate(ids)],
        "utt2spk": [f"{name} spr-ö{number % 3}" for number, name in enumerate(ids)],
    }
    lexicon = tmp_path / "wörter.txt"
    lexicon.write_text("öffnen Ö F\nschließen SCH ß\n", encoding="utf-8")
    for name, table in lines.items():
        (source / name).write_text("\n".join(table) + "\n", encoding="utf-8")
    commands = (
        f"prepare {source} {data} --lexicon {lexicon} --shards 1 --split speaker:dev=spr-ö1,test=spr-ö2"
        f";inspect {data};train {data} {run} --layers 1 --cells 8 --epochs 1"
        f";decode {run} {data} --split dev;report {run}"
    )
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LC_", "LANG", "PYTHONUTF8"))
    }
    outcome = subprocess.run(
        [sys.executable, "-c", COMMANDS, commands],
        env={**kept, "LC_ALL": "C", **PLAIN},
        capture_output=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr.decode(errors="replace")
    assert "l\\xe4ufe/report/report.html" in outcome.stdout.decode("ascii")
    hypotheses = (run / "hypotheses" / "dev.txt").read_text(encoding="utf-8")
    assert [line.split()[0] for line in hypotheses.splitlines()] == ids[1::3]
