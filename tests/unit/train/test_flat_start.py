"""A first alignment from nothing: found on speech with known states, by any number of ranks, and stopped."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
import torch

from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.shards.alignment_file import open_targets
from speechdp.data.shards.dataset import Dataset
from speechdp.data.shards.shard import Shard
from speechdp.errors import ConfigError, RunError
from speechdp.labels.hmm import IntArray, StateInventory
from speechdp.labels.lexicon import Lexicon
from speechdp.options.batch import BatchOptions, LoadingOptions
from speechdp.options.run import ModelOptions, TrainOptions
from speechdp.parallel.run_files import RunDirectory
from speechdp.parallel.stop import StopRequest
from speechdp.process.ending import Stopped
from speechdp.train import flat_start
from speechdp.train.flat_start import train_mixtures
from speechdp.train.realign import check_overwriting, make_alignments, train_with_realignment
from speechdp.train.session import Session
from tests.helpers.spoken_states import WORDS, write_spoken

CPU = torch.device("cpu")
OPTIONS = TrainOptions(ModelOptions(layers=1, cells=4), BatchOptions(batch_size=8), epochs=1, flat_start=True)


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, dict[str, list[IntArray]]]:
    return write_spoken(tmp_path_factory.mktemp("spoken") / "data")


def right_frames(dataset: Dataset, folder: Path | None, truth: dict[str, list[IntArray]]) -> float:
    """Return the share of all frames whose class, in `folder` or in the data, is the true one."""
    right = total = 0
    for split in ("train", "dev"):
        for path in dataset.shard_paths(split):
            with ExitStack() as stack:
                shard = stack.enter_context(Shard(path))
                of_folder = None
                if folder is not None:
                    of_folder = stack.enter_context(closing(open_targets(folder / path.name, shard)))
                for u, states in enumerate(truth[path.name]):
                    found = shard.read(u)[1] if of_folder is None else of_folder.read(u)
                    right += int((found == states).sum())
                    total += len(states)
    return right / total


def test_it_finds_the_states_that_a_uniform_alignment_does_not(
    spoken: tuple[Dataset, dict[str, list[IntArray]]], tmp_path: Path
) -> None:
    dataset, truth = spoken
    session = Session(dataset, SerialCommunicator(), CPU)
    folder = make_alignments(session, OPTIONS, tmp_path)
    assert folder == tmp_path / "alignments" / "0" and RunDirectory(folder).is_complete
    assert right_frames(dataset, None, truth) < 0.2
    # Of phones that occur in one word only, a state may stand for its neighbour: nothing tells them apart.
    assert right_frames(dataset, folder, truth) > 0.7
    written = (folder / "train-00000.h5").stat().st_mtime_ns
    make_alignments(session, OPTIONS, tmp_path)  # what is done is not done again
    assert (folder / "train-00000.h5").stat().st_mtime_ns == written


def test_any_number_of_ranks_finds_the_same(
    spoken: tuple[Dataset, dict[str, list[IntArray]]], tmp_path: Path
) -> None:
    dataset, _ = spoken
    alone = train_mixtures(Session(dataset, SerialCommunicator(), CPU), "train")
    # More ranks than shards: some have no utterances at all.
    found = run_threads(4, lambda comm: train_mixtures(Session(dataset, comm, CPU), "train"))
    assert {f.utterances for f in found} == {alone.utterances} == {30}
    x = np.random.default_rng(1).normal(size=(9, alone.mixtures.dim)).astype(np.float32)
    for f in found:
        np.testing.assert_array_equal(f.mixtures.log_likelihoods(x), found[0].mixtures.log_likelihoods(x))
        np.testing.assert_allclose(
            f.mixtures.log_likelihoods(x), alone.mixtures.log_likelihoods(x), rtol=1e-3
        )
        assert f.log_likelihood == pytest.approx(alone.log_likelihood, rel=1e-6)


def test_of_utterances_of_one_length_a_part_is_taken(
    spoken: tuple[Dataset, dict[str, list[IntArray]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, truth = spoken
    lengths = sorted(len(states) for name, of in truth.items() if name.startswith("train") for states in of)
    # All are taken for as long as the shortest: of the frames there are, half are wanted.
    monkeypatch.setattr(np, "diff", lambda offsets, **_: np.full(len(offsets) - 1, 50))
    monkeypatch.setattr(flat_start, "_MAX_FRAMES", 50 * len(lengths) // 2)
    chosen = [run_threads(size, lambda comm: len(_reader(dataset, comm).read("train"))) for size in (1, 3)]
    assert sum(chosen[0]) == sum(chosen[1]) and 8 <= sum(chosen[0]) <= 22


def test_utterances_that_are_all_too_long_are_to_be_cut(
    spoken: tuple[Dataset, dict[str, list[IntArray]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat_start, "_LONGEST", 5)
    with pytest.raises(
        RunError, match="all utterances have more than 5 frames, too many for --flat-start; cut"
    ):
        train_mixtures(Session(spoken[0], SerialCommunicator(), CPU), "train")


def _reader(dataset: Dataset, comm: Communicator) -> flat_start._Reader:
    lexicon, inventory = Lexicon.load(dataset.lexicon_path), StateInventory.load(dataset.classes_path)
    return flat_start._Reader(Session(dataset, comm, CPU), lexicon, inventory, are_cepstra=False)


def test_all_ranks_stop_where_one_is_asked(spoken: tuple[Dataset, dict[str, list[IntArray]]]) -> None:
    dataset, _ = spoken

    def on_rank(comm: Communicator) -> bool:
        looks = 0

        class Asked(StopRequest):
            @property
            def received(self) -> str | None:  # type: ignore[override]
                nonlocal looks
                looks += 1
                return "SIGTERM" if comm.rank == 1 and looks > 20 else None

            @received.setter
            def received(self, _value: str | None) -> None:
                pass

        try:
            train_mixtures(Session(dataset, comm, CPU, stop=Asked()), "train")
        except Stopped:
            return True
        return False

    assert run_threads(2, on_rank) == [True, True]


def with_lexicon(path: Path, changes: dict[str, tuple[tuple[str, ...], ...] | None]) -> Session:
    """Write a corpus and change its lexicon afterwards; None takes a word out."""
    dataset, _ = write_spoken(path, num_utterances=4)
    lexicon = Lexicon.load(dataset.lexicon_path)
    words = {**lexicon.pronunciations, **changes}
    Lexicon({word: v for word, v in words.items() if v is not None}).save(dataset.lexicon_path)
    return Session(dataset, SerialCommunicator(), CPU)


def test_utterances_with_unknown_words_are_left_out(tmp_path: Path) -> None:
    session = with_lexicon(tmp_path / "data", {"two": None})
    spoken = [text.split() for path in session.dataset.shard_paths("train") for text in texts_of(path)]
    without = sum("two" not in words for words in spoken)
    assert 0 < without < len(spoken)
    assert train_mixtures(session, "train").utterances == without


def test_unknown_words_have_their_own_phone_where_the_lexicon_has_one(tmp_path: Path) -> None:
    dataset, _ = write_spoken(tmp_path / "data", num_utterances=4)
    lexicon = Lexicon.load(dataset.lexicon_path)
    rest = Lexicon({word: v for word, v in lexicon.pronunciations.items() if word != "two"}).with_unknown()
    rest.save(dataset.lexicon_path)
    StateInventory(rest.phones).save(dataset.classes_path)
    found = train_mixtures(Session(dataset, SerialCommunicator(), CPU), "train")
    assert found.utterances == sum(len(texts_of(path)) for path in dataset.shard_paths("train"))


def texts_of(path: Path) -> tuple[str, ...]:
    with Shard(path) as shard:
        return shard.texts


def test_an_alignment_that_other_options_made_is_not_taken(
    spoken: tuple[Dataset, dict[str, list[IntArray]]], tmp_path: Path
) -> None:
    session = Session(spoken[0], SerialCommunicator(), CPU)
    for number, made_by in (("0", {"flat_start": True}), ("1", {"flat_start": False, "epochs": 3})):
        folder = tmp_path / "alignments" / number
        folder.mkdir(parents=True)
        RunDirectory(folder).complete({"made_by": made_by})
    with pytest.raises(ConfigError, match=r"alignments/1: was made with other options \(--epochs 3\)"):
        make_alignments(session, dataclasses.replace(OPTIONS, realign=1), tmp_path)
    assert make_alignments(session, OPTIONS, tmp_path) == tmp_path / "alignments" / "0"


def test_a_run_that_is_there_is_refused_before_anything_is_aligned(
    spoken: tuple[Dataset, dict[str, list[IntArray]]], tmp_path: Path
) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="already holds a run"):
        train_with_realignment(Session(spoken[0], SerialCommunicator(), CPU), OPTIONS, tmp_path)
    assert not (tmp_path / "alignments").exists()


def test_options_that_cannot_be_trained_with_are_refused_before_anything_is_aligned(
    spoken: tuple[Dataset, dict[str, list[IntArray]]], tmp_path: Path
) -> None:
    session = Session(spoken[0], SerialCommunicator(), CPU)
    options = dataclasses.replace(OPTIONS, loading=LoadingOptions(preprocess_on="gpu"))
    with pytest.raises(ConfigError, match="this rank computes on the CPU"):
        train_with_realignment(session, options, tmp_path)
    assert not (tmp_path / "alignments").exists()
    with pytest.raises(ConfigError, match="this rank computes on the CPU"):
        check_overwriting(session, options, tmp_path)


def test_transcripts_that_no_utterance_can_hold(tmp_path: Path) -> None:
    endless: tuple[tuple[str, ...], ...] = (("W",) * 400,)
    session = with_lexicon(tmp_path / "data", dict.fromkeys(WORDS, endless))
    with pytest.raises(RunError, match="frames enough"):
        train_mixtures(session, "train")


def test_options_that_do_not_go_with_it() -> None:
    with pytest.raises(ConfigError, match="--flat-start and --alignments"):
        TrainOptions(flat_start=True, alignments=Path("a"))
    with pytest.raises(ConfigError, match="--flat-start"):
        TrainOptions(task="synthesis", flat_start=True)
