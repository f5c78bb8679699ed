"""The examples of docs/api.md run as they stand there, over several ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from speechdp.parallel.registry import strategy_names
from speechdp.report.runs.folders import read_run

DOC = Path(__file__).parents[2] / "docs" / "api.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", DOC.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run_example(number: int) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(EXAMPLES[number], f"{DOC}, example {number + 1}", "exec"), names)
    for test in [value for name, value in names.items() if name.startswith("test_")]:
        test()


@pytest.fixture(autouse=True)
def _two_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEECHDP_BACKEND", "threads:2")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_run_as_written(number: int) -> None:
    run_example(number)


@pytest.mark.parametrize("strategy", strategy_names())
def test_the_first_example_runs_with_every_strategy(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEECHDP_STRATEGY", strategy)
    monkeypatch.setenv("SPEECHDP_FOLDER", "run")
    run_example(0)
    assert read_run(Path("run")).strategy == strategy and Path("model.pt").is_file()


def test_the_example_with_checkpoints_goes_on_from_them() -> None:
    run_example(2)
    metrics = Path("runs/slowmo/metrics.jsonl")
    evaluated = metrics.read_text()
    metrics.write_text(evaluated + evaluated.splitlines()[-1].replace('"step": 6', '"step": 9') + "\n")
    run_example(2)
    assert metrics.read_text() == evaluated and len(evaluated.splitlines()) == 2
