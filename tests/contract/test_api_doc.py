"""The examples of docs/api.md run as they stand there, over several ranks."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from speechdp import DataParallel, exit_codes
from speechdp.parallel import script_folder, stop
from speechdp.parallel.registry import STRATEGIES, strategy_names
from speechdp.report.runs.folders import read_run
from speechdp.tasks.base import LOSS
from speechdp.tasks.metrics import Metric
from speechdp.tasks.registry import task_class
from speechdp.testing import make_batch, task_contract
from tests.unit.parallel.test_stop import Clock

DOC = Path(__file__).parents[2] / "docs" / "api.md"
#: Of the example that resumes a loop over epochs.
EPOCHS = 3
EXAMPLES = re.findall(r"^```python\n(.*?)^```", DOC.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def _models_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models begin alike in every run: ranks that are threads draw from one generator, in any order."""

    def fill(layer: torch.nn.Linear) -> None:
        generator = torch.Generator().manual_seed(layer.in_features)
        for parameter in layer.parameters():
            torch.nn.init.uniform_(parameter, -0.5, 0.5, generator)

    monkeypatch.setattr(torch.nn.Linear, "reset_parameters", fill)


def run_example(number: int) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(EXAMPLES[number], f"{DOC}, example {number + 1}", "exec"), names)
    for test in [value for name, value in names.items() if name.startswith("test_")]:
        test()


@pytest.fixture(autouse=True)
def _two_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEECHDP_BACKEND", "threads:2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(STRATEGIES, "registered", dict(STRATEGIES.registered))  # forget the page's own


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


@pytest.mark.usefixtures("_models_alike")
@pytest.mark.parametrize("asked_at", [3, 8, 11])
def test_the_example_with_epochs_may_be_stopped_anywhere(
    asked_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight batches an epoch; ranks learn of the signal some steps later."""
    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    run_example(EPOCHS)
    whole = torch.load("model.pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stop, "time", Clock(1.0))
    look = DataParallel.should_stop.fget
    assert look is not None
    steps: list[int] = []

    def asked(run: DataParallel) -> bool:
        is_told: bool = look(run)
        if run.steps == asked_at:
            assert run._stop is not None
            run._stop._request.received = "SIGTERM"
        if is_told:
            steps.append(run.steps)
        return is_told

    with monkeypatch.context() as patches, pytest.raises(SystemExit) as ended:
        patches.setattr(DataParallel, "should_stop", property(asked))
        run_example(EPOCHS)
    assert ended.value.code == exit_codes.STOPPED
    assert steps[0] == steps[1] < 24 and not Path("model.pt").exists()
    monkeypatch.setattr(script_folder, "_begun_here", set())  # of another process
    run_example(EPOCHS)
    resumed = torch.load("model.pt")
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    metrics = Path("runs/epochs/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in metrics] == [0, 1, 2]


def test_the_page_names_the_fields_of_a_metric_in_their_order() -> None:
    (row,) = [
        line for line in DOC.read_text(encoding="utf-8").splitlines() if line.startswith("| `metrics` |")
    ]
    named = re.findall(r"`(\w+)`", row.split("|")[2].partition("; models")[0])
    fields = {field.name: field for field in dataclasses.fields(Metric)}
    required = [name for name, field in fields.items() if field.default is dataclasses.MISSING]
    assert named == [*required, "higher_is_better", "True", "False", "tolerance"]
    assert fields["higher_is_better"].default is True
    assert f"({fields['tolerance'].default})" in row


def test_the_task_of_the_page_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (written,) = [example for example in EXAMPLES if "class Frames(Task)" in example]
    (stages,) = re.findall(r"^    modules = .*?\n(?=\S)", DOC.read_text(), re.MULTILINE | re.DOTALL)
    imports = "from speechdp.tasks.base import LOSS, Stage\n"
    (tmp_path / "own.py").write_text(f"{imports}{written}\n{stages}")
    monkeypatch.syspath_prepend(tmp_path)
    task_contract("own:Frames:width=8")
    task = task_class("own:Frames")()
    model = torch.nn.Sequential(torch.nn.Linear(5, 4))  # of make_batch's features and classes
    batch = make_batch(0, 0)
    values: dict[str, torch.Tensor] = {}
    for stage in task.stages(model.double()):
        values |= stage.run(values, batch)
    assert torch.equal(values[LOSS], task.loss(model, batch).total)
