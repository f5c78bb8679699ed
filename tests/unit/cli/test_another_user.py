"""A user who may write neither run nor installation nor home: served, or refused before the work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from speechdp.comm.serial import SerialCommunicator
from speechdp.decode.recogniser import DecodingOptions
from speechdp.decode.split import decode_split
from speechdp.errors import RunError
from speechdp.synthesis.generate import GenerateOptions, Synthesiser
from speechdp.synthesis.held_out import EvaluationRequest, evaluate_split
from speechdp.tasks.model_file import load_synthesis_model
from tests.helpers.oracle import Spoken, oracle, write_dataset
from tests.helpers.tiny_data import TinySizes
from tests.helpers.tiny_speech import write_tiny_speech
from tests.helpers.untrained_speech import write_untrained_run


def refuse_new_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse every new file in every folder, as somebody else's do; rights bind no root."""

    def refuse(*_: object, dir: Path, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr("speechdp.files.tempfile.TemporaryFile", refuse)


def test_decoding_into_a_run_of_somebody_elses_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = write_dataset(tmp_path / "data", [[Spoken("a", "one", "one")]])
    refuse_new_files(monkeypatch)
    monkeypatch.setattr("speechdp.decode.recogniser.Recogniser", None)  # nothing is recognised
    with pytest.raises(
        RunError, match=r"run/hypotheses: cannot be written \(Permission denied\); make it writable"
    ):
        decode_split(
            oracle(dataset.num_classes),
            dataset,
            "test",
            tmp_path / "run",
            DecodingOptions(),
            SerialCommunicator(),
        )


def test_so_is_measuring_synthesis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = write_tiny_speech(tmp_path / "data", TinySizes(1, 1, 1, shards=1))
    run = write_untrained_run(tmp_path / "run", dataset)
    synthesiser = Synthesiser(load_synthesis_model(run, torch.device("cpu")), GenerateOptions())
    refuse_new_files(monkeypatch)
    monkeypatch.setattr(Synthesiser, "say", None)
    with pytest.raises(RunError, match=r"run: cannot be written \(Permission denied\); make it writable"):
        evaluate_split(synthesiser, dataset, EvaluationRequest(run, "test"), lambda *_: None)
