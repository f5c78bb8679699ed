"""Utterances of 0 frames: `prepare` refuses them by name; shards of other programs may hold some."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from speechdp.comm.serial import SerialCommunicator
from speechdp.data.prepare.pipeline import prepare
from speechdp.data.shards.dataset import Dataset
from speechdp.data.shards.shard import Utterance
from speechdp.data.transforms.preprocess import AugmentOptions, InputOptions
from speechdp.decode.recogniser import DecodingOptions
from speechdp.decode.split import decode_split
from speechdp.errors import ConfigError, ShardError
from speechdp.options.batch import BatchOptions
from speechdp.options.prepare import FilesOptions, KaldiOptions, PrepareOptions
from speechdp.options.run import ModelOptions, TrainOptions
from speechdp.synthesis.generate import GenerateOptions, Synthesiser
from speechdp.synthesis.held_out import EvaluationRequest, evaluate_split
from speechdp.tasks.model_file import load_model, load_synthesis_model
from speechdp.train.realign import train_with_realignment
from speechdp.train.session import Session
from tests.helpers.corpora import digit_folder, no_progress, write_tone
from tests.helpers.kaldi_files import ali_dir, feats_dir, some_features, some_path
from tests.helpers.tiny_data import AnyUtterance, TinySizes, rewrite_shard, write_tiny_data
from tests.helpers.tiny_speech import write_tiny_speech
from tests.helpers.untrained_speech import write_untrained_run

OPTIONS = TrainOptions(
    ModelOptions(layers=1, cells=4),
    BatchOptions(batch_size=2, chunk_frames=10),
    inputs=InputOptions(deltas=1, splice=1),
    epochs=1,
    realign=1,
)


def without_frames(utterances: list[AnyUtterance]) -> list[AnyUtterance]:
    """Take all frames of the first utterance away."""
    first, *others = utterances
    content = (
        {"features": first.content[:0]} if isinstance(first, Utterance) else {"samples": first.content[:0]}
    )
    return [dataclasses.replace(first, targets=first.targets[:0], **content), *others]


def with_empty_utterances(dataset: Dataset) -> Dataset:
    """Put one into every split."""
    for split in dataset.split_names:
        dataset = rewrite_shard(dataset, split, without_frames)
    dataset.verify()
    return dataset


@pytest.mark.parametrize("stored", ["features", "audio"])
def test_training_alignment_and_decoding_go_past_them(tmp_path: Path, stored: str) -> None:
    options = OPTIONS
    if stored == "features":
        dataset = write_tiny_data(tmp_path / "data", TinySizes(6, 4, 4))
    else:
        options = dataclasses.replace(options, augment=AugmentOptions(speed_perturb=True, noise_snr_db="5-9"))
        folder = digit_folder(tmp_path / "wav")
        made = PrepareOptions((folder, tmp_path / "data"), num_mel_bins=6, workers=1, store="audio")
        dataset = prepare(made, no_progress).dataset
    dataset = with_empty_utterances(dataset)
    session = Session(dataset, SerialCommunicator(), torch.device("cpu"))
    train_with_realignment(session, options, tmp_path / "run")
    (metrics,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(metrics)["heldout_frames"] == dataset.num_frames("dev")
    model = load_model(tmp_path / "run", torch.device("cpu"))
    result = decode_split(model, dataset, "test", tmp_path / "run", DecodingOptions(), SerialCommunicator())
    assert len(result.hypotheses.read_text().splitlines()) == dataset.num_utterances("test")


def test_prepare_names_audio_of_no_frame_before_it_works(tmp_path: Path) -> None:
    folder = digit_folder(tmp_path / "wav", num_indices=11)
    for index in (10, 11, 12):
        write_tone(folder / f"0_ann_{index}.wav", 0.004)
    stages: list[str] = []
    message = r"0_ann_10\.wav: is shorter than one frame, as are 2 others of train; leave it out"
    with pytest.raises(ConfigError, match=message):
        prepare(PrepareOptions((folder, tmp_path / "data")), lambda stage, done, total: stages.append(stage))
    assert set(stages) == {"reading headers"}
    assert [path.name for path in tmp_path.iterdir()] == ["wav"]


def test_audio_of_no_frame_is_left_out_as_incomplete(tmp_path: Path) -> None:
    """--skip-incomplete was told to leave it out of the corpus by hand."""
    folder = digit_folder(tmp_path / "wav", num_indices=11)
    for index in (10, 11, 12):
        write_tone(folder / f"0_ann_{index}.wav", 0.004)
    files = FilesOptions(skip_incomplete=True)
    made = prepare(PrepareOptions((folder, tmp_path / "data"), files=files, workers=1), no_progress)
    left_out = "left out: 3 utterances that have less than one frame of audio, first 0_ann_10"
    assert any(notice.startswith(left_out) for notice in made.notices)
    like = PrepareOptions((folder, tmp_path / "like"), like=tmp_path / "data", files=files, workers=1)
    assert any(notice.startswith(left_out) for notice in prepare(like, no_progress).notices)


def test_where_all_audio_is_of_no_frame_nothing_is_advised_that_was_done(tmp_path: Path) -> None:
    folder = tmp_path / "wav"
    folder.mkdir()
    for index in range(8):
        write_tone(folder / f"0_ann_{index}.wav", 0.004)
    options = PrepareOptions(
        (folder, tmp_path / "data"),
        files=FilesOptions(skip_incomplete=True),
        split="random:dev=0.3,test=0.3",
        workers=1,
    )
    with pytest.raises(ConfigError, match=r"is shorter than one frame.*; leave it out of the corpus$"):
        prepare(options, no_progress)


def test_an_empty_matrix_of_kaldis(tmp_path: Path) -> None:
    features = some_features((7, 5, 9, 8))
    alignments = {utterance: some_path(len(matrix)) for utterance, matrix in features.items()}
    features["utt2"] = np.zeros((0, 0), np.float32)
    kaldi = KaldiOptions(
        kaldi=feats_dir(tmp_path / "kaldi", features),
        ali=ali_dir(tmp_path / "ali", {**alignments, "utt2": []}),
        feats=True,
    )
    options = PrepareOptions((tmp_path / "data",), from_kaldi=kaldi, split="random:dev=0")
    assert prepare(options, no_progress).notices == (
        "left out: 1 utterance that has no alignment, first utt2",
    )
    kaldi = dataclasses.replace(kaldi, ali=ali_dir(tmp_path / "ali2", alignments))
    aligned = dataclasses.replace(options, from_kaldi=kaldi, overwrite=True)
    with pytest.raises(ConfigError, match="utterance utt2: 0 frames of features, 9 in its alignment"):
        prepare(aligned, no_progress)


def test_synthesis_is_not_measured_on_them(tmp_path: Path) -> None:
    dataset = with_empty_utterances(write_tiny_speech(tmp_path / "data", TinySizes(2, 2, 2, shards=1)))
    run = write_untrained_run(tmp_path / "run", dataset)
    synthesiser = Synthesiser(load_synthesis_model(run, torch.device("cpu")), GenerateOptions())
    with pytest.raises(ShardError, match="utterance test-000 has no frame"):
        evaluate_split(synthesiser, dataset, EvaluationRequest(tmp_path / "run", "test"), lambda *_: None)
