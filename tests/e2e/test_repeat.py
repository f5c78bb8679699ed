"""A run repeated from its own record; every file it leaves is in the table of docs/run-directory.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

from tests.helpers.finished_run import assert_equal_runs
from tests.helpers.mpi import REPOSITORY, job_environment
from tests.helpers.tiny_data import TINY_MODEL, write_tiny_data


def listed_names() -> list[str]:
    """Return the files of a run in the documentation's table, as patterns."""
    text = (REPOSITORY / "docs" / "run-directory.md").read_text()
    table = text[text.index("## RUN/") : text.index("### run.json")]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    return [
        re.sub(r"N{4,}|[A-Z]{4,}|\bN\b", "*", name) + ("*" if name.endswith("/") else "") for name in names
    ]


def words(command: list[str]) -> list[str]:
    """Return a recorded command as this interpreter runs it."""
    assert command[0] == "speechdp"
    return [sys.executable, "-m", *command]


def test_a_run_is_repeated_by_its_command_and_leaves_what_is_documented(tmp_path: Path) -> None:
    write_tiny_data(tmp_path / "data")
    options = [*TINY_MODEL, "--batch-size", "4", "--epochs", "1", "--dropout", "0.1", "--seed", "3"]
    environment = {**job_environment(), "PYTHONPATH": str(REPOSITORY)}
    # By relative paths: the record says from where.
    command = ["speechdp", "train", "data", "run", *options]
    run, first = tmp_path / "run", tmp_path / "first"
    subprocess.run(words(command), cwd=tmp_path, env=environment, check=True, capture_output=True)
    run.rename(first)
    record = json.loads((first / "run.json").read_text())
    assert record["command"] == command and record["seed"] == 3
    assert {"git", "hostfile", "launch", "scheduler", "environment", "versions"} <= record.keys()
    assert record["environment"]["OMP_NUM_THREADS"] == environment["OMP_NUM_THREADS"]
    again = words(record["command"])
    subprocess.run(again, cwd=record["directory"], env=environment, check=True, capture_output=True)
    assert_equal_runs(run, first)

    names = [str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()]
    patterns = listed_names()
    unlisted = [name for name in names if not any(fnmatch(name, pattern) for pattern in patterns)]
    assert unlisted == [] and len(names) > 8
