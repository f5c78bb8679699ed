"""Graphs of large language models are built by one rank, kept in the run, and read by everybody else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.shards.dataset import Dataset
from speechdp.decode import kept_graph, recogniser, tuning
from speechdp.decode.graphs.graph import CtcTransducer, DecodingGraph, LexiconTransducer
from speechdp.decode.kept_graph import GRAPH_FOLDER, GRAPH_NAME, RECORD_NAME, KeptGraph, graph_key
from speechdp.decode.language_model import StoredModel, save_language_model
from speechdp.decode.recogniser import DecodingOptions
from speechdp.decode.results import DecodingResult
from speechdp.decode.split import decode_split
from speechdp.decode.tuning import tune
from speechdp.experiments.sweep import training as sweep_training
from speechdp.labels.hmm import StateInventory
from speechdp.labels.lexicon import Lexicon
from speechdp.language.kneser_ney import estimate
from speechdp.options.run import TrainOptions
from tests.helpers.oracle import Spoken, oracle, write_dataset

SHARDS = [
    [Spoken("c1", "one two", "one two"), Spoken("a1", "three", "four", 25)],
    [Spoken("b1", "four", "four", 22), Spoken("a2", "one", "one one", 50)],
]


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    """Data with a language model, which lacks one of the lexicon's words."""
    dataset = write_dataset(tmp_path / "data", SHARDS)
    texts = [["one", "two"], ["four"], ["one", "one"]]
    save_language_model(estimate(texts, 2, {"one", "two", "four"}), dataset.path)
    return dataset


@pytest.fixture(autouse=True)
def every_model_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recogniser, "LARGE_MODEL_BYTES", 0)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the scales of the language model of all graphs that are built."""
    scales: list[float] = []
    build: Callable[..., DecodingGraph] = recogniser.build_graph

    def counted(*args: object, lm_scale: float, **more: object) -> DecodingGraph:
        scales.append(lm_scale)
        return build(*args, lm_scale=lm_scale, **more)

    monkeypatch.setattr(recogniser, "build_graph", counted)
    return scales


def decode(dataset: Dataset, run: Path, comm: Communicator, **options: float) -> DecodingResult:
    chosen = DecodingOptions(**options)  # type: ignore[arg-type]
    return decode_split(oracle(dataset.num_classes), dataset, "test", run, chosen, comm)


def told(result: DecodingResult) -> tuple[object, ...]:
    return result.utterances, result.unknown_words, result.settings


def test_one_rank_builds_and_the_next_command_reads(
    dataset: Dataset, tmp_path: Path, built: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    results = run_threads(3, lambda comm: decode(dataset, run, comm))
    assert built == [1.0] and (run / GRAPH_FOLDER / GRAPH_NAME).is_file()
    results += run_threads(2, lambda comm: decode(dataset, run, comm))
    results.append(decode(dataset, run, SerialCommunicator(), insertion_log_prob=0.0))
    assert built == [1.0]
    monkeypatch.setattr(recogniser, "LARGE_MODEL_BYTES", 1 << 30)
    results.append(decode(dataset, tmp_path / "other", SerialCommunicator()))
    assert built == [1.0, 1.0] and not (tmp_path / "other" / GRAPH_FOLDER).exists()
    assert results[-1].unknown_words == 1  # three
    assert all(told(result) == told(results[-1]) for result in results)


def test_insertion_scores_are_those_of_a_graph_that_was_not_kept(
    dataset: Dataset, tmp_path: Path, built: list[float]
) -> None:
    run, comm = tmp_path / "run", SerialCommunicator()
    kept = [decode(dataset, run, comm, insertion_log_prob=-1000.0) for _ in range(2)]
    assert built == [1.0] and told(kept[0]) == told(kept[1])
    without = decode(dataset, run, comm)
    assert without.wer.insertions > kept[0].wer.insertions


def test_another_scale_takes_its_place(dataset: Dataset, tmp_path: Path, built: list[float]) -> None:
    run = tmp_path / "run"
    for scale in (1.0, 2.0, 2.0, 1.0):
        decode(dataset, run, SerialCommunicator(), lm_scale=scale)
    assert built == [1.0, 2.0, 1.0]
    assert {path.name for path in (run / GRAPH_FOLDER).iterdir()} == {GRAPH_NAME, RECORD_NAME}


def test_what_killed_decodings_left_is_removed(dataset: Dataset, tmp_path: Path, built: list[float]) -> None:
    run = tmp_path / "run"
    names = (
        f"{GRAPH_FOLDER}/.{GRAPH_NAME}.0a1b2c.tmp",
        "hypotheses/.test.txt.0a1b2c.tmp",
        ".wer-test.json.0a1b2c.tmp",
    )
    for name in names:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).touch()
        os.utime(run / name, (0, 0))
    decode(dataset, run, SerialCommunicator())
    assert built == [1.0] and (run / GRAPH_FOLDER / GRAPH_NAME).is_file()
    assert (run / "hypotheses" / "test.txt").is_file() and (run / "wer-test.json").is_file()
    assert not any((run / name).exists() for name in names)


def test_tuning_uses_it(dataset: Dataset, tmp_path: Path, built: list[float]) -> None:
    run = tmp_path

    def chosen(comm: Communicator) -> float:
        kept = KeptGraph(run, comm)
        trained = oracle(dataset.num_classes)
        return tune(trained, dataset, "test", DecodingOptions(), comm, kept=kept).options.lm_scale

    assert len(set(run_threads(2, chosen))) == 1
    assert len(built) == len(set(built)) and (run / GRAPH_FOLDER / GRAPH_NAME).is_file()


def test_what_was_chosen_is_not_built_again(
    dataset: Dataset, tmp_path: Path, built: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was, where another setting was tried after it; and it is kept without an insertion score."""
    monkeypatch.setattr(tuning, "_VALUES", {"lm_scale": (1.0, 1.4, 2.0), "insertion_log_prob": (-9.0, 0.0)})
    comm, trained = SerialCommunicator(), oracle(dataset.num_classes)
    given = DecodingOptions(insertion_log_prob=-9.0)
    (tmp_path / "run").mkdir()
    tuned = tune(trained, dataset, "test", given, comm, kept=KeptGraph(tmp_path / "run", comm))
    assert built == [1.0, 1.4, 2.0] and tuned.options.lm_scale == 1.0
    after = decode_split(trained, dataset, "test", tmp_path / "run", given, comm)
    assert built == [1.0, 1.4, 2.0]
    anew = decode_split(trained, dataset, "test", tmp_path / "other", given, comm)
    assert told(after) == told(anew) and len(built) == 4


def cut(folder: Path) -> None:
    path = folder / GRAPH_NAME
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder: Path) -> None:
    path = folder / GRAPH_NAME
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def lose(folder: Path) -> None:
    (folder / GRAPH_NAME).unlink()


def garble(folder: Path) -> None:
    (folder / RECORD_NAME).write_text('{"key": 3')


def empty(folder: Path) -> None:
    (folder / RECORD_NAME).write_text("[]")


@pytest.mark.parametrize("damage", [cut, flip, lose, garble, empty])
def test_a_damaged_one_is_built_anew(
    damage: Callable[[Path], None], dataset: Dataset, tmp_path: Path, built: list[float]
) -> None:
    run = tmp_path / "run"
    before = decode(dataset, run, SerialCommunicator())
    damage(run / GRAPH_FOLDER)
    again = run_threads(2, lambda comm: decode(dataset, run, comm))
    assert built == [1.0, 1.0] and all(told(each) == told(before) for each in again)
    decode(dataset, run, SerialCommunicator())
    assert built == [1.0, 1.0]


def test_where_it_cannot_be_kept_everybody_builds_one(
    dataset: Dataset, tmp_path: Path, built: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / GRAPH_FOLDER).write_text("a file of the user's")
    results = run_threads(2, lambda comm: decode(dataset, run, comm))
    assert built == [1.0, 1.0] and told(results[0]) == told(results[1])
    (line,) = capfd.readouterr().err.splitlines()
    assert (
        line.startswith("speechdp: warning: ")
        and str(run / GRAPH_FOLDER) in line
        and "(File exists): every" in line
    )
    assert (run / GRAPH_FOLDER).read_text() == "a file of the user's"


def test_a_rank_that_does_not_see_it_builds_its_own(
    dataset: Dataset, tmp_path: Path, built: list[float]
) -> None:
    """As on a node that does not see the run's folder."""
    runs = [tmp_path / "run", tmp_path / "elsewhere"]
    (runs[1]).mkdir()
    results = run_threads(2, lambda comm: decode(dataset, runs[comm.rank], comm))
    assert built == [1.0, 1.0] and told(results[0]) == told(results[1])


def test_it_can_be_discarded(dataset: Dataset, tmp_path: Path) -> None:
    run = tmp_path / "run"
    decode(dataset, run, SerialCommunicator())
    (run / GRAPH_FOLDER / ".graph.fst.7.tmp").touch()  # of a command that was killed
    for _ in range(2):
        KeptGraph(run, SerialCommunicator()).discard()
        assert not (run / GRAPH_FOLDER).exists()


def test_a_sweep_keeps_none(
    dataset: Dataset, tmp_path: Path, built: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its runs has another, of gigabytes maybe."""
    monkeypatch.setattr(sweep_training, "load_model", lambda *_, **__: oracle(dataset.num_classes))
    session = SimpleNamespace(
        dataset=dataset,
        comm=SerialCommunicator(),
        device="cpu",
        reporter=SimpleNamespace(notice=print),
        is_asked_to_stop=lambda: False,
    )
    sweep_training._decode(session, TrainOptions(held_out="test"), "test", tmp_path / "run")  # type: ignore[arg-type]
    assert built and (tmp_path / "run" / "wer-test.json").is_file()
    assert not (tmp_path / "run" / GRAPH_FOLDER).exists()
    (tmp_path / "run" / GRAPH_FOLDER).mkdir()  # as where it was killed before it could remove that
    sweep_training._decode(session, TrainOptions(held_out="test"), "test", tmp_path / "run")  # type: ignore[arg-type]
    assert not (tmp_path / "run" / GRAPH_FOLDER).exists()


def test_a_key_tells_all_that_a_graph_is_made_of(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    lexicon = Lexicon.load(dataset.lexicon_path)
    inventory = StateInventory.load(dataset.classes_path)
    stay = np.full(dataset.num_classes, 0.5)

    def key(transducer: LexiconTransducer, lm_scale: float = 1.0) -> str:
        model = StoredModel.in_folder(dataset.path)
        assert model is not None
        return graph_key(transducer, model, lm_scale)

    def transducer() -> LexiconTransducer:
        return LexiconTransducer(lexicon, inventory, stay)

    assert key(transducer()) == key(transducer())
    word, variants = next(iter(lexicon.pronunciations.items()))
    changed = Lexicon({**lexicon.pronunciations, word: variants[:1] * 2})
    keys = [
        key(transducer()),
        key(transducer(), 1.5),
        key(LexiconTransducer(lexicon, inventory, stay + 1e-9)),
        key(LexiconTransducer(lexicon, inventory, stay, 0.25)),
        key(LexiconTransducer(changed, inventory, stay)),
        key(CtcTransducer(lexicon, inventory)),
    ]
    save_language_model(estimate([["one"]], 1, {"one"}), dataset.path)
    keys.append(key(transducer()))
    monkeypatch.setattr(kept_graph, "_CODE", ())  # other code
    keys.append(key(transducer()))
    assert len(set(keys)) == len(keys)
