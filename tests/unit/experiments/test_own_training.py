"""How a comparison begins, and decodes what it has trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from speechdp.errors import RunError
from speechdp.experiments.arguments import split_to_tune_on
from speechdp.experiments.compare.own_training import CompareRequest, OwnTraining
from speechdp.experiments.compare.plan import SEQUENTIAL, ComparePlan
from speechdp.experiments.compare.record import RunRecord
from tests.helpers.options import options_with


def request_for(out: Path, split: str, **options: Any) -> CompareRequest:
    """Ask for one run on one rank, whose split is decoded afterwards ("": none)."""
    plan = ComparePlan((SEQUENTIAL,), (1,), (1,), ("frames",), 5)
    return CompareRequest(out, "", out, options_with(**options), plan, split)


class NeverStarts:
    """Starts no job; notes the commands of those that it was to start."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []

    def run(self, ranks: int, words: list[str], *others: object, **named: object) -> str:
        self.commands.append(words)
        return "did not start"


@pytest.mark.parametrize(
    ("given", "rounds"),
    [
        ({"flat_start": True}, []),
        ({"context": "left"}, []),
        ({"realign": 2, "epochs": 5}, ["--realign-epochs=5"]),
        ({"realign": 2, "realign_epochs": 3}, ["--realign-epochs=3"]),
        ({"flat_start": True, "epochs": 3, "average_epochs": 2}, []),
    ],
)
def test_only_rounds_of_alignment_are_told_their_epochs(
    tmp_path: Path, given: dict[str, Any], rounds: list[str]
) -> None:
    starter = NeverStarts()
    request = request_for(tmp_path, "", **given)
    with pytest.raises(RunError, match="the alignment failed: did not start"):
        OwnTraining(request, starter, lambda text: None).begin()  # type: ignore[arg-type]
    assert [word for word in starter.commands[0] if word.startswith("--realign-epochs")] == rounds
    assert not any(word.startswith("--average-epochs") for word in starter.commands[0])


def test_graphs_that_decoding_keeps_are_removed(tmp_path: Path) -> None:
    """Each run has another, of gigabytes maybe."""
    graph = tmp_path / "run" / "decoding-graph"

    class Starter:
        def run(self, ranks: int, words: list[str], *others: object, **named: object) -> None:
            graph.mkdir()
            (graph / "graph.fst").touch()

    request = request_for(tmp_path, "test", epochs=5)
    graph.parent.mkdir()
    for name in ("completed.json", "model.safetensors"):
        (graph.parent / name).write_text("{}")
    training = OwnTraining(request, Starter(), lambda text: None)  # type: ignore[arg-type]
    assert training.run(RunRecord(SEQUENTIAL, 1, 1, "frames", 5), graph.parent) is None
    assert not graph.exists()


@pytest.mark.parametrize(
    ("given", "says"), [({}, []), ({"task": "tdnn:Tdnn:width=8"}, ["--task=tdnn:Tdnn:width=8"])]
)
def test_a_network_of_ones_own_is_decoded_with_its_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], says: list[str]
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples" / "own_network")
    starter = NeverStarts()
    training = OwnTraining(request_for(tmp_path, "test", epochs=5, **given), starter, lambda text: None)  # type: ignore[arg-type]
    for name in ("completed.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    assert training.run(RunRecord(SEQUENTIAL, 1, 1, "frames", 5), tmp_path) == "did not start"
    (words,) = starter.commands
    assert words[0] == "decode" and [word for word in words if word.startswith("--task")] == says


def test_a_run_that_tries_a_learning_rate_trains_with_it_and_is_not_decoded(tmp_path: Path) -> None:
    starter = NeverStarts()
    training = OwnTraining(request_for(tmp_path, "test", epochs=5), starter, lambda text: None)  # type: ignore[arg-type]
    trial = RunRecord(SEQUENTIAL, 1, 1000, "rates", 5, learning_rate=0.25)
    run_dir = tmp_path / "run"
    assert training.run(trial, run_dir) == "did not start"
    assert "--learning-rate=0.25" in starter.commands[0] and not training.is_done(trial, run_dir)
    run_dir.mkdir()
    for name in ("completed.json", "model.safetensors"):
        (run_dir / name).write_text("{}")
    assert training.is_done(trial, run_dir) and training.run(trial, run_dir) is None
    assert len(starter.commands) == 1  # none to decode
    assert not training.is_done(RunRecord(SEQUENTIAL, 1, 1, "frames", 5, learning_rate=0.25), run_dir)


@pytest.mark.parametrize(("there", "command"), [("model.safetensors", "decode"), ("other.txt", "train")])
def test_a_model_that_is_gone_is_made_again_before_decoding(tmp_path: Path, there: str, command: str) -> None:
    starter = NeverStarts()
    request = request_for(tmp_path, "test", epochs=5)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for name in ("completed.json", there):
        (run_dir / name).write_text("{}")
    run = RunRecord(SEQUENTIAL, 1, 1, "frames", 5)
    training = OwnTraining(request, starter, lambda text: None)  # type: ignore[arg-type]
    assert training.run(run, run_dir) == "did not start"
    assert starter.commands[0][0] == command


@pytest.mark.parametrize("name", ["lm.arpa.gz", "G.fst"])
def test_scales_are_chosen_where_there_is_a_language_model(tmp_path: Path, name: str) -> None:
    assert split_to_tune_on(tmp_path, "dev", "test") is None
    (tmp_path / name).touch()
    assert split_to_tune_on(tmp_path, "dev", "test") == "dev"
    assert split_to_tune_on(tmp_path, "dev", "dev") == "dev"  # each run at its best there
    assert split_to_tune_on(tmp_path, "dev", "") is None
