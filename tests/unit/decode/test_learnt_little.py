"""What a network's outputs say of how much it has learnt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.transforms.preprocess import inputs_of
from speechdp.decode.recogniser import DecodingOptions, recogniser_for
from speechdp.decode.scoring import Outputs
from speechdp.decode.split import SpokenSplit, decode_split
from tests.helpers.oracle import Spoken, oracle, write_dataset

START = "the model has learnt little, or there is no speech in these recordings"


def remark(*rows: list[float], words: bool = True) -> str:
    """Judge posteriors, an utterance each of 50 frames."""
    outputs = Outputs(len(rows[0]) if rows else 3)
    for row in rows:
        with np.errstate(divide="ignore"):
            outputs.note(np.log(np.tile(np.float32(row), (50, 1))))
    return outputs.remark(SerialCommunicator(), are_words_found=words)


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize(
    "rows",
    [
        [[0.9, 0.05, 0.05]] * 2,
        [[0.34, 0.33, 0.33], [0.33, 0.34, 0.33]],
        [[1.0, 0.0, 0.0]] * 2,
    ],
)
def test_outputs_that_are_nearly_the_same_everywhere_are_told(rows: list[list[float]], words: bool) -> None:
    start = f"{START}: 0.0 % of what its outputs say depends on what it hears; train it"
    assert remark(*rows, words=words).startswith(start)


def test_outputs_of_one_class_are_told_where_nothing_is_recognised() -> None:
    rows = [[0.99, 0.01, 0.0], [0.9, 0.02, 0.08]]  # as CTC begins: blanks alone, and a guess
    sign = "no word is recognised, and one class is the likeliest in 100.0 % of the frames"
    assert remark(*rows, words=False).startswith(f"{START}: {sign}; train it")
    assert remark(*rows, words=True) == ""
    spikes = [*rows * 10, [0.3, 0.7, 0.0]]  # other settings may find words by the other class
    assert remark(*spikes, words=False) == ""


def test_a_word_on_any_rank_counts() -> None:
    def run(comm: Communicator, finder: int) -> str:
        outputs = Outputs(3)
        for row in ([0.99, 0.01, 0.0], [0.9, 0.02, 0.08]):
            if comm.rank == 0:  # the other one has no utterance
                outputs.note(np.log(np.tile(np.float32(row) + 1e-9, (50, 1))))
        return outputs.remark(comm, are_words_found=comm.rank == finder)

    for finder in (0, 1):
        assert run_threads(2, lambda comm, finder=finder: run(comm, finder)) == ["", ""]
    (told, same) = run_threads(2, lambda comm: run(comm, 2))
    assert told == same != ""


def test_large_and_small_utterances_are_summed_alike() -> None:
    generator = np.random.default_rng(1)
    logits = generator.normal(0, 0.02, (9, 20_000)).astype(np.float32)  # in three portions
    log_posteriors = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    whole, single = Outputs(20_000), Outputs(20_000)
    whole.note(log_posteriors)
    for frame in log_posteriors:
        single.note(frame[None])
    told = whole.remark(SerialCommunicator(), are_words_found=True)
    assert told == single.remark(SerialCommunicator(), are_words_found=True) != ""


@pytest.mark.parametrize(
    "rows",
    [
        [[0.9, 0.1, 0.0], [0.5, 0.0, 0.5]],  # blanks are the likeliest everywhere, but the phones are known
        [[0.4, 0.3, 0.3], [0.3, 0.4, 0.3]],  # not sure, but it tells them apart
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]],
        [[1.0]],
        [],
    ],
)
def test_others_are_not(rows: list[list[float]]) -> None:
    assert remark(*rows) == ""


def test_only_who_asks_for_it_pays_for_the_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not `transcribe`, nor who listens to synthetic speech: they only recognise."""
    noted: list[int] = []
    monkeypatch.setattr(Outputs, "note", lambda _, log_posteriors: noted.append(len(log_posteriors)))
    dataset = write_dataset(tmp_path / "data", [[Spoken("a", "one", "one"), Spoken("b", "two", "two")]])
    model, comm, options = oracle(dataset.num_classes), SerialCommunicator(), DecodingOptions()
    with SpokenSplit.open(dataset, "test", comm) as reader:
        recogniser = recogniser_for(model, dataset, options, reader.transcripts)
        found = dict(recogniser.recognise(reader.features(inputs_of(model.config))))
    assert [found[position][0].words for position in (0, 1)] == [("one",), ("two",)]
    assert not noted
    decode_split(model, dataset, "test", tmp_path / "run", options, comm)
    assert len(noted) == 2


def test_what_is_no_number_is_left_to_the_search() -> None:
    outputs = Outputs(2)
    outputs.note(np.full((3, 2), np.nan, np.float32))
    assert outputs.remark(SerialCommunicator(), are_words_found=False) == ""
