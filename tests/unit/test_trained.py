"""Models of runs from Python: what they take, and one line where they cannot."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

import speechdp
from speechdp.data.shards.dataset import Manifest
from speechdp.data.signal.features import FeatureConfig
from speechdp.errors import ConfigError, RunError, ShardError
from speechdp.labels.hmm import StateInventory
from speechdp.models.lstm_am import LstmAcousticModel, LstmConfig
from speechdp.parallel.run_files import WEIGHTS
from speechdp.synthesis.generate import GenerateOptions, Synthesiser
from speechdp.tasks.model_file import ClassCounts, load_synthesis_model, save_model
from tests.helpers.corpora import tone
from tests.helpers.tiny_speech import write_tiny_speech
from tests.helpers.untrained_speech import write_untrained_run

INVENTORY = StateInventory(("ah", "b"))
RATE = 8000
BINS = 23


def write_run(run: Path, features: FeatureConfig | None = None, facts: dict[str, Any] | None = None) -> Path:
    """Write a run of a model that has learnt nothing, as `speechdp train --deltas 1` would leave it."""
    size = INVENTORY.num_classes
    counts = ClassCounts(np.arange(1, size + 1), np.ones(size, dtype=np.int64))
    features = FeatureConfig(num_mel_bins=BINS) if features is None else features
    head = {
        "feature_dim": 2 * features.feature_dim,
        "num_classes": size,
        "sampling_rate": RATE,
        "features": features.to_dict(),
        "inputs": {"deltas": 1, "splice": 0},
    }
    torch.manual_seed(1)
    model = LstmAcousticModel(2 * features.feature_dim, size, LstmConfig(1, 4, True))
    (run / "trained_on").mkdir(parents=True)
    INVENTORY.save(run / "trained_on" / "classes.txt")
    save_model(run, model, counts, head | (facts or {}))
    return run


@pytest.fixture
def model(tmp_path: Path) -> speechdp.AcousticModel:
    return speechdp.AcousticModel(write_run(tmp_path / "run"))


def test_features_are_the_networks_input_and_posteriors_those_of_its_logits(
    model: speechdp.AcousticModel,
) -> None:
    features = model.features(tone(0.5), RATE)
    assert features.dtype == np.float32 and features.shape[1] == 2 * BINS and len(features) > 40
    logits = model.network(torch.from_numpy(features)[None], torch.tensor([len(features)]))
    posteriors = model.log_posteriors(features)
    np.testing.assert_allclose(posteriors, logits[0].log_softmax(-1).detach(), atol=1e-5)
    np.testing.assert_allclose(np.exp(model.log_priors), np.arange(1, 10) / 45, rtol=1e-5)
    assert model.class_names == INVENTORY.class_names()


def test_other_rates_are_resampled(model: speechdp.AcousticModel) -> None:
    assert len(model.features(tone(0.5, 16000), 16000)) == len(model.features(tone(0.5), RATE))


def test_samples_of_either_byte_order_are_the_same(model: speechdp.AcousticModel) -> None:
    samples = np.asarray(tone(0.5) * 32767, dtype=np.int16)
    for kind in (">i2", "<i2", ">f4", "<f8"):
        scale = 1 if kind.endswith("i2") else 32768
        features = model.features((samples / scale).astype(kind), RATE)
        np.testing.assert_array_equal(features, model.features(samples, RATE), err_msg=kind)


def test_what_overflows_is_refused_without_a_warning(
    model: speechdp.AcousticModel, recwarn: pytest.WarningsRecorder
) -> None:
    with np.errstate(all="raise"), pytest.raises(ConfigError, match="NaN or infinity"):
        model.features(np.full(99, 1e300), RATE)
    assert not recwarn.list


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_network_may_be_given_another_number_format(
    model: speechdp.AcousticModel, dtype: torch.dtype
) -> None:
    features = model.features(tone(0.5), RATE)
    wanted = model.log_posteriors(features)
    model.network.to(dtype)
    found = model.log_posteriors(features)
    assert found.dtype == np.float32
    tolerance = 1e-5 if dtype == torch.float64 else 0.05  # bfloat16 has 8 bits
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance)


def test_sound_shorter_than_a_frame_has_none(model: speechdp.AcousticModel) -> None:
    features = model.features(np.zeros(20), RATE)
    assert features.shape == (0, 2 * BINS)
    assert model.log_posteriors(features).shape == (0, INVENTORY.num_classes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.features(tone(0.1)), "samples without their rate; add sampling_rate="),
        (lambda m: m.features(tone(0.1), 0), "sampling_rate=0: must be a number above 0"),
        (lambda m: m.features(np.zeros((2, 99)), RATE), r"not an array of shape \(2, 99\)"),
        (lambda m: m.features(3e4 * tone(0.1), RATE), "where 1 is full scale; divide them"),
        (lambda m: m.features(np.zeros(99, dtype=np.int32), RATE), "samples of int32; give floating point"),
        (lambda m: m.features([np.nan] * 99, RATE), "NaN or infinity"),
        (lambda m: m.features(tone(0.1), "8000"), "sampling_rate='8000': must be a number above 0"),
        (lambda m: m.features(tone(0.1), 8), r"sampling_rate=8: must be 1,000 to 10,000,000 Hz"),
        (lambda m: m.features(tone(0.1), 10**30), "sampling_rate=10{30}: must be 1,000 to"),
        (lambda m: m.features(b"RIFF"), r"samples of \|S4; give floating point"),
        (lambda m: m.features("/"), "^/: is a folder; give a file in it"),
        (lambda m: m.features("talk.wav", RATE), "talk.wav: the file states its own sampling rate"),
        (
            lambda m: m.features([[0.0, 1.0], [0.0]], RATE),
            "^not an array of numbers .*; give a numpy array or torch tensor",
        ),
        (lambda m: m.features(torch.zeros(99).to_sparse(), RATE), "^not an array of numbers .*Sparse"),
        (lambda m: m.log_posteriors([["a"] * 46]), "^features of <U1; give floating point"),
        (lambda m: m.log_posteriors(np.zeros((3, 46), np.complex64)), "^features of complex64; give"),
        (
            lambda m: m.log_posteriors(np.where(np.arange(9)[:, None] == 7, np.inf, np.zeros((9, 46)))),
            "^features have NaN or infinity, first in frame 7; fix them$",
        ),
        (lambda m: m.log_posteriors(torch.full((3, 46), torch.nan)), "infinity, first in frame 0; fix"),
        (lambda m: m.log_posteriors(np.zeros((3, 5))), r"shape \(3, 5\): the network takes \(frames, 46\)"),
    ],
)
def test_what_it_cannot_take(
    model: speechdp.AcousticModel, call: Callable[[speechdp.AcousticModel], Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        call(model)


def test_tuned_weights_of_another_grammar_are_not_left_out_without_a_word(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    run = write_run(tmp_path / "run")
    (run / "trained_on" / "lexicon.txt").write_text("ab ah b\n")
    Manifest(RATE, FeatureConfig(num_mel_bins=BINS), INVENTORY.num_classes, "flat", "random:", {}).write(
        run / "trained_on"
    )
    record = {
        "grammar": "ngram",
        "options": dict.fromkeys(WEIGHTS, 0.5),
        "tuning": {"split": "dev", "chosen": {"acoustic_scale": 0.5}},
    }
    (run / "tuned.json").write_text(json.dumps(record))
    speechdp.AcousticModel(run, acoustic_scale=1.0).transcribe(tone(0.5), RATE)  # the user's choice
    assert not recwarn.list
    model = speechdp.AcousticModel(run)
    with pytest.warns(UserWarning, match=r"are not used with word-loop; .* with acoustic_scale and") as said:
        model.transcribe(tone(0.5), RATE)
    assert [Path(warning.filename) for warning in said] == [Path(__file__)]
    (run / "tuned.json").write_text(json.dumps(record | {"grammar": "word-loop"}))
    recwarn.clear()
    speechdp.AcousticModel(run).transcribe(tone(0.5), RATE)
    assert not recwarn.list


def test_a_run_that_was_copied_in_part_is_refused(tmp_path: Path) -> None:
    """The words, and the names of classes, would be wrong; the remedy is not to prepare data."""
    run, file = tmp_path / "run", tmp_path / "talk.wav"
    model = speechdp.AcousticModel(write_run(run, facts={"classes_sha256": INVENTORY.sha256}))
    soundfile.write(file, tone(0.5), RATE)
    again = "copy it again from the run, or from the data that were trained on$"
    kept = run / "trained_on"
    with pytest.raises(RunError, match=rf"trained_on/data\.json: is missing; {again}"):
        model.features(file)
    with pytest.raises(RunError, match=rf"trained_on/lexicon\.txt: is missing; {again}"):
        model.transcribe(file)
    (kept / "lexicon.txt").write_text("ah AH\n")
    with pytest.raises(RunError, match=rf"trained_on/data\.json: is missing; {again}"):
        model.transcribe(file)
    (kept / "data.json").write_text("{")
    with pytest.raises(ShardError, match=rf"trained_on/data\.json: damaged \(.*\); {again}"):
        model.transcribe(file)
    Manifest(RATE, FeatureConfig(num_mel_bins=BINS), 6, "flat", "random:", {}).write(kept)
    StateInventory(INVENTORY.phones[:1]).save(kept / "classes.txt")  # cut off at the end of a line
    message = rf"trained_on/classes\.txt: is not the class list the model was trained on; {again}"
    for call in (lambda: model.class_names, lambda: model.transcribe(file)):
        with pytest.raises(ConfigError, match=message):
            call()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beem": 3}, "no option beem; there are beam, max_active"),
        ({"beam": -1.0}, "^beam -1.0: must be"),
        ({"beam": "wide"}, "^beam='wide': must be a number$"),
        ({"max_active": True}, "^max_active=True: must be a whole number$"),
        ({"nbest": 2.5}, "^nbest=2.5: must be a whole number$"),
        ({"rescore_lm": 3}, "^rescore_lm=3: must be a path$"),
        ({"lattice_beam": 3.0}, "^lattice_beam goes with nbest N or rescore_lm FILE; give one"),
        ({"device": "gpu"}, '^device="gpu": torch cannot compute there'),
        ({"device": None}, '^device="None": torch cannot compute there'),
        ({"device": "mps"}, r"^device=\"mps\": torch cannot compute there \(.{,99}'MPS' backend\); give"),
        ({"task": LstmAcousticModel}, "^task=<class .*: must be a name or MODULE:CLASS, in quotes$"),
        ({"device": "meta"}, '^device="meta": torch cannot compute there'),
    ],
)
def test_options_of_the_search_that_there_are_not(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        speechdp.AcousticModel(write_run(tmp_path / "run"), **options)


def test_options_may_be_paths_as_strings_and_numbers_of_numpy(tmp_path: Path) -> None:
    options = {"rescore_lm": "words.arpa", "nbest": np.int64(3), "beam": np.float32(12), "lm_scale": None}
    speechdp.AcousticModel(write_run(tmp_path / "run"), **options)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "setting",
    [
        torch.inference_mode,
        lambda: torch.device("meta"),
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: default_dtype(torch.float64),
        lambda: default_dtype(torch.bfloat16),
    ],
    ids=["inference_mode", "device", "autocast", "float64", "bfloat16"],
)
def test_what_a_program_has_set_for_its_own_networks_changes_nothing(
    setting: Callable[[], AbstractContextManager[Any]], tmp_path: Path
) -> None:
    run, spoken = (
        write_run(tmp_path / "run"),
        write_untrained_run(tmp_path / "spoken", write_tiny_speech(tmp_path / "data")),
    )

    def results(model: speechdp.AcousticModel, voice: speechdp.SynthesisModel) -> list[Any]:
        features = model.features(tone(0.5), RATE)
        return [features, model.log_posteriors(features), voice.say("one two")]

    options = {"iterations": 2, "max_seconds": 0.1}
    before = speechdp.AcousticModel(run), speechdp.SynthesisModel(spoken, **options)
    wanted = results(*before)
    with setting():
        within = speechdp.AcousticModel(run), speechdp.SynthesisModel(spoken, **options)
        found = [results(*before), results(*within)]
    for number, those in enumerate((*found, results(*within))):
        for one, other in zip(those, wanted, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=str(number))
    network = within[0].network.train()  # made for training, too
    frames = torch.from_numpy(wanted[0])[None]
    network(frames, torch.tensor([frames.shape[1]])).sum().backward()


def test_a_voice_leaves_random_numbers_and_what_is_trained_as_they_are(tmp_path: Path) -> None:
    run = write_untrained_run(tmp_path / "run", write_tiny_speech(tmp_path / "data"))
    voice = speechdp.SynthesisModel(run, iterations=2, max_seconds=0.1)
    said = voice.say("one two")
    modes = {name: name != "encoder" for name, _ in voice.network.named_children()}
    for name, part in voice.network.named_children():
        part.train(modes[name])
    weights = {name: value.clone() for name, value in voice.network.state_dict().items()}
    torch.manual_seed(7)
    drawn = torch.rand(3)
    torch.manual_seed(7)
    speechdp.SynthesisModel(run)
    assert np.array_equal(voice.say("one two"), said)
    assert torch.equal(torch.rand(3), drawn)
    assert {name: part.training for name, part in voice.network.named_children()} == modes
    assert all(torch.equal(value, weights[name]) for name, value in voice.network.state_dict().items())


def test_threads_may_share_a_voice(tmp_path: Path) -> None:
    run = write_untrained_run(tmp_path / "run", write_tiny_speech(tmp_path / "data"))
    voice = speechdp.SynthesisModel(run, iterations=2, max_seconds=0.3)
    text = "one two"
    wanted = voice.spectrograms(text).linear
    with ThreadPoolExecutor(4) as threads:
        for said in threads.map(voice.spectrograms, [text] * 12):
            np.testing.assert_array_equal(said.linear, wanted)


@pytest.mark.parametrize("text", [None, 3, ["one"], b"one"])
def test_what_is_no_text_is_refused(tmp_path: Path, text: Any) -> None:
    run = write_untrained_run(tmp_path / "run", write_tiny_speech(tmp_path / "data"))
    with pytest.raises(ConfigError, match=rf"^a text of type {type(text).__name__}; give a str$"):
        speechdp.SynthesisModel(run).say(text)


@pytest.mark.parametrize(
    ("record", "inside", "what"),
    [("sweep.json", "", "a sweep"), ("compare.json", "", "a comparison"), ("tune.json", "runs", "a search")],
)
def test_what_holds_runs_is_no_run(record: str, inside: str, what: str, tmp_path: Path) -> None:
    (tmp_path / record).write_text("{}")
    with pytest.raises(RunError, match=f"^{tmp_path}: is {what}, not a run; give the folder of a run$"):
        speechdp.AcousticModel(tmp_path)
    run = write_run(tmp_path / inside / "b")
    with pytest.raises(RunError, match=f"; give the folder of a run, such as {run}$"):
        speechdp.SynthesisModel(tmp_path)


def test_a_task_is_asked_for_as_an_argument(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", facts={"task": "own:Network", "options": "width=3"})
    with pytest.raises(RunError, match="a task of your own, own:Network; give the task of the training"):
        speechdp.AcousticModel(run)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_computes_the_same_by_a_network_of_its_own(
    model: speechdp.AcousticModel, copied: Callable[[speechdp.AcousticModel], speechdp.AcousticModel]
) -> None:
    features = model.features(tone(0.5), RATE)
    other = copied(model)
    np.testing.assert_array_equal(other.features(tone(0.5), RATE), features)
    before = model.log_posteriors(features)
    np.testing.assert_array_equal(other.log_posteriors(features), before)
    torch.nn.init.zeros_(other.network.output.weight)
    assert not np.array_equal(other.log_posteriors(features), before)
    np.testing.assert_array_equal(model.log_posteriors(features), before)


def test_many_utterances_have_the_posteriors_that_each_has_alone(model: speechdp.AcousticModel) -> None:
    utterances = [model.features(tone(seconds), RATE) for seconds in (0.3, 0.001, 0.7, 0.5)]
    found = model.log_posteriors_of_all(map(torch.from_numpy, utterances))
    assert [len(rows) for rows in found] == [len(rows) for rows in utterances]
    for rows, features in zip(found, utterances, strict=True):
        np.testing.assert_allclose(rows, model.log_posteriors(features), atol=1e-5)
    assert model.log_posteriors_of_all([]) == []


def test_samples_of_torch_in_bfloat16_are_heard_as_rounded(model: speechdp.AcousticModel) -> None:
    rounded = torch.from_numpy(tone(0.2)).bfloat16()
    np.testing.assert_array_equal(model.features(rounded, RATE), model.features(rounded.float(), RATE))


def test_no_samples_have_no_frames(model: speechdp.AcousticModel) -> None:
    assert model.features(np.zeros(0), RATE).shape == (0, 2 * BINS)


def test_features_that_kaldi_made_are_given_to_the_network_as_they_are(tmp_path: Path) -> None:
    model = speechdp.AcousticModel(write_run(tmp_path / "run", FeatureConfig(kind="kaldi", kaldi_dim=BINS)))
    assert model.log_posteriors(np.zeros((4, 2 * BINS))).shape == (4, INVENTORY.num_classes)
    with pytest.raises(ConfigError, match="features that Kaldi made cannot be computed from audio"):
        model.features(tone(0.1), RATE)


def test_a_voice_says_what_the_command_writes(tmp_path: Path) -> None:
    run = write_untrained_run(tmp_path / "run", write_tiny_speech(tmp_path / "data"))
    options = {"iterations": 2, "max_seconds": 0.1, "dropout": False}
    voice = speechdp.SynthesisModel(run, **options)
    said = Synthesiser(load_synthesis_model(run, torch.device("cpu")), GenerateOptions(**options))
    text = "one two"
    (_, speech), *_ = said.say(said.encode([text]))
    assert np.array_equal(voice.spectrograms(text).linear, speech.linear)
    assert np.array_equal(voice.say(text), said.samples(speech.linear))
    soundfile.write(tmp_path / "out.wav", voice.say(text), voice.sampling_rate)
    with pytest.raises(ConfigError, match="no option sead; there are iterations, max_seconds, seed"):
        speechdp.SynthesisModel(run, sead=1)
    with pytest.raises(ConfigError, match=r"^iterations 0: must be at least 1"):
        speechdp.SynthesisModel(run, iterations=0)
    with pytest.raises(RunError, match=r"model\.safetensors: no such model"):
        speechdp.SynthesisModel(tmp_path)
