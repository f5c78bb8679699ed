"""Data directories from Kaldi's data directories and alignments: what they hold, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from speechdp.cli.main import run as speechdp
from speechdp.comm.serial import SerialCommunicator
from speechdp.data.kaldi.cmvn import SpeakerCmvn
from speechdp.data.prepare import pipeline
from speechdp.data.prepare.jobs import run_jobs
from speechdp.data.prepare.pipeline import Prepared, prepare
from speechdp.data.shards.dataset import Dataset
from speechdp.data.shards.shard import AudioUtterance, Utterance
from speechdp.data.signal.audio import read_audio
from speechdp.data.signal.compute import compute_features
from speechdp.data.signal.features import FeatureConfig, normalise, num_frames_of
from speechdp.decode.recogniser import DecodingOptions
from speechdp.decode.split import decode_split
from speechdp.errors import ConfigError, ShardError
from speechdp.labels.kaldi_pdfs import KaldiPdfs, load_classes
from speechdp.options.prepare import FilesOptions, KaldiOptions, PrepareOptions
from tests.helpers.corpora import kaldi_folder, no_progress, write_tone
from tests.helpers.kaldi_files import (
    PDFS_OF_TUPLES,
    ali_dir,
    feats_dir,
    some_features,
    some_path,
    write_alignments,
    write_feats,
    yesno_data_dir,
    yesno_system,
)
from tests.helpers.oracle import oracle

LENGTHS = (7, 1, 30, 12, 9, 11, 20, 3)
FEATURES = some_features(LENGTHS)
NO_SPLIT = "random:dev=0"
#: Features that Kaldi has made, normalised utterance by utterance.
OF_KALDI = FeatureConfig(kind="kaldi", kaldi_dim=5)


def alignments_for(lengths: dict[str, int], seed: int = 0) -> dict[str, list[int]]:
    """Draw paths of the made-up model."""
    return {name: some_path(length, seed + n) for n, (name, length) in enumerate(lengths.items())}


ALIGNMENTS = alignments_for({utterance: len(matrix) for utterance, matrix in FEATURES.items()})


@pytest.fixture
def options(tmp_path: Path) -> PrepareOptions:
    """Features of two speakers and their alignment, all of it training data."""
    kaldi = feats_dir(tmp_path / "kaldi", FEATURES)
    return PrepareOptions(
        (tmp_path / "data",),
        from_kaldi=KaldiOptions(kaldi=kaldi, ali=ali_dir(tmp_path / "ali", ALIGNMENTS), feats=True),
        split=NO_SPLIT,
        shards=2,
        dtype="float32",
        workers=1,
    )


def changed(options: PrepareOptions, **changes: Any) -> PrepareOptions:
    """Replace options, those of from_kaldi among them."""
    names = {field.name for field in dataclasses.fields(KaldiOptions)}
    kaldi = {name: changes.pop(name) for name in names & changes.keys()}
    return dataclasses.replace(
        options, from_kaldi=dataclasses.replace(options.from_kaldi, **kaldi), **changes
    )


def kaldi_of(options: PrepareOptions) -> tuple[Path, Path]:
    """Return Kaldi's data directory and alignment directory."""
    kaldi, ali = options.from_kaldi.kaldi, options.from_kaldi.ali
    assert kaldi is not None and ali is not None
    return kaldi, ali


def prepared(options: PrepareOptions) -> Prepared:
    result = prepare(options, no_progress)
    assert not list(options.data.parent.glob(".*"))  # nothing half-made is left
    return result


def utterances_of(dataset: Dataset) -> dict[str, Utterance | AudioUtterance]:
    """Read everything, checksums verified."""
    found: dict[str, Utterance | AudioUtterance] = {}
    for split in dataset.split_names:
        for index in range(len(dataset.shard_paths(split))):
            with dataset.open_shard(split, index) as shard:
                for number in range(shard.num_utterances):
                    found[shard.utterance_id(number)] = shard.read_utterance(number)
    return found


def pdfs_of(utterance: str) -> list[int]:
    return [PDFS_OF_TUPLES[transition - 1] for transition in ALIGNMENTS[utterance]]


def test_features_and_pdfs_go_into_shards(options: PrepareOptions) -> None:
    result = prepared(options)
    dataset = result.dataset
    assert result.notices == ()
    assert (dataset.num_classes, dataset.feature_dim, dataset.alignment) == (6, 5, "kaldi")
    assert load_classes(dataset.classes_path) == KaldiPdfs(6)
    assert len(dataset.shard_paths("train")) == 2 and dataset.splits["train"].speakers == 2
    found = utterances_of(dataset)
    assert found.keys() == FEATURES.keys()
    for number, (name, matrix) in enumerate(FEATURES.items()):
        utterance = found[name]
        assert isinstance(utterance, Utterance)
        assert utterance.targets.tolist() == pdfs_of(name)
        np.testing.assert_allclose(utterance.features, normalise(matrix, OF_KALDI), atol=1e-6)
        assert (utterance.speaker, utterance.text) == (f"spk{number % 2}", "")


def test_processes_write_the_same_bytes(options: PrepareOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(options)
    monkeypatch.setattr("speechdp.data.prepare.jobs._FEWEST_FOR_PROCESSES", 0)
    other = changed(options, paths=(options.data.with_name("other"),), workers=2)
    prepared(other)
    files = sorted(path.name for path in options.data.iterdir())
    assert files == ["classes.txt", "data.json", "files.json", "train-00000.h5", "train-00001.h5"]
    for name in files:
        assert (options.data / name).read_bytes() == (other.data / name).read_bytes()


def statistics(matrices: list[npt.NDArray[np.float32]]) -> npt.NDArray[np.float64]:
    """Compute what compute-cmvn-stats writes."""
    rows = np.concatenate(matrices).astype(np.float64)
    sums = np.append(rows.sum(axis=0), len(rows))
    return np.stack([sums, np.append((rows**2).sum(axis=0), 0.0)])


@pytest.mark.parametrize(("mean", "variance"), [(True, True), (True, False), (False, False)])
def test_cmvn_scp_is_applied_by_speaker(options: PrepareOptions, mean: bool, variance: bool) -> None:
    spoken = {f"spk{n}": [m for i, m in enumerate(FEATURES.values()) if i % 2 == n] for n in range(2)}
    write_feats(
        kaldi_of(options)[0],
        {name: statistics(matrices) for name, matrices in spoken.items()},  # type: ignore[misc]
        name="cmvn",
        kind="double",
    )
    dataset = prepared(changed(options, mean_normalise=mean, variance_normalise=variance)).dataset
    assert dataset.features.cmvn == "speaker"
    found = utterances_of(dataset)
    for number, (name, matrix) in enumerate(FEATURES.items()):
        rows = np.concatenate(spoken[f"spk{number % 2}"]).astype(np.float64)
        expected = matrix - rows.mean(axis=0) if mean else matrix
        expected = expected / rows.std(axis=0) if variance else expected
        utterance = found[name]
        assert isinstance(utterance, Utterance)
        np.testing.assert_allclose(utterance.features, expected, atol=1e-5)
    plain = prepared(changed(options, overwrite=True, cmvn="utterance")).dataset
    assert plain.features.cmvn == "utterance"


@pytest.mark.parametrize(
    ("text", "means", "variances"),
    [
        ("\n", True, False),  # Kaldi's own defaults
        ("--norm-means=true --norm-vars=true\n", True, True),
        ("--norm-means=false\n", False, False),
    ],
)
def test_cmvn_opts_of_the_alignment_say_what_is_normalised(
    options: PrepareOptions, text: str, means: bool, variances: bool
) -> None:
    folder, ali = kaldi_of(options)
    sums = {f"spk{n}": statistics(list(FEATURES.values())) for n in range(2)}
    write_feats(folder, sums, name="cmvn", kind="double")  # type: ignore[arg-type]
    (ali / "cmvn_opts").write_text(text)
    result = prepared(options)
    features = result.dataset.features
    assert (features.mean_normalise, features.variance_normalise) == (means, variances)
    assert result.notices[0].startswith(f"normalised as {ali / 'cmvn_opts'} says: ")
    # Features that are not normalised by cmvn.scp are no matter of that file.
    own = prepared(changed(options, overwrite=True, cmvn="utterance"))
    assert own.dataset.features.variance_normalise and own.notices == ()
    fewer = prepared(changed(options, overwrite=True, mean_normalise=False)).dataset.features
    assert not fewer.mean_normalise


@pytest.mark.parametrize("text", ["--skip-dims=13:14", "--norm-vars=perhaps", '--norm-vars="'])
def test_cmvn_opts_that_are_not_done_are_refused(options: PrepareOptions, text: str) -> None:
    folder, ali = kaldi_of(options)
    sums = {f"spk{n}": statistics(list(FEATURES.values())) for n in range(2)}
    write_feats(folder, sums, name="cmvn", kind="double")  # type: ignore[arg-type]
    (ali / "cmvn_opts").write_text(text)
    with pytest.raises(ConfigError, match="cmvn_opts: ") as caught:
        prepare(options, no_progress)
    assert "\n" not in str(caught.value) and ";" in str(caught.value)


def test_cmvn_statistics_that_do_not_fit_are_refused(options: PrepareOptions) -> None:
    sums = statistics(list(FEATURES.values()))
    bad = {"spk0": sums, "spk1": sums[:, 1:], "spk2": np.zeros_like(sums)}
    cmvn = SpeakerCmvn(write_feats(kaldi_of(options)[0], bad, name="cmvn", kind="double"))  # type: ignore[arg-type]
    cmvn.of("spk0", 5)
    for speaker, reason in {
        "spk1": r"speaker spk1: statistics of shape \(2, 5\), not \(2, 6\)",
        "spk2": "speaker spk2: statistics of 0 frames",
        "spk3": "lacks speaker spk3",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            cmvn.of(speaker, 5)


def test_what_lacks_a_part_is_left_out_and_counted(options: PrepareOptions) -> None:
    folder, ali = kaldi_of(options)
    lines = (folder / "feats.scp").read_text().splitlines(keepends=True)
    (folder / "feats.scp").write_text("".join(lines[1:]))  # without utt0
    kept = {u: values for u, values in ALIGNMENTS.items() if u not in ("utt2", "utt4")}
    for job in (1, 2):
        part = {u: v for n, (u, v) in enumerate({**kept, "other": [1, 2]}.items()) if n % 2 == job - 1}
        write_alignments(ali / f"ali.{job}.gz", part)
    result = prepared(options)
    assert utterances_of(result.dataset).keys() == {"utt1", "utt3", "utt5", "utt6", "utt7"}
    assert result.notices == (
        "left out: 1 utterance that is not in feats.scp, first utt0",
        "left out: 2 utterances that have no alignment, first utt2",
        f"left out: 1 utterance that is aligned, but not in {folder}, first other",
    )


def test_other_lengths_are_refused_and_leave_nothing(options: PrepareOptions) -> None:
    wrong = {**ALIGNMENTS, "utt3": some_path(11)}
    write_alignments(
        kaldi_of(options)[1] / "ali.2.gz", {u: wrong[u] for u in ("utt1", "utt3", "utt5", "utt7")}
    )
    with pytest.raises(ConfigError, match="utterance utt3: 12 frames of features, 11 in its alignment"):
        prepare(options, no_progress)
    assert sorted(path.name for path in options.data.parent.iterdir()) == ["ali", "kaldi"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_features_that_are_not_finite_are_refused_by_their_place(
    options: PrepareOptions, value: float, dtype: Any
) -> None:
    """The line named a shard that is not there any more, and advised --dtype float32, also where that was."""
    damaged = {**FEATURES, "utt3": FEATURES["utt3"].copy()}
    damaged["utt3"][7, 2] = value
    kaldi = kaldi_of(options)[0]
    table = write_feats(kaldi, damaged)
    with pytest.raises(
        ConfigError,
        match=r"feats\.ark: utterance utt3: value 2 of frame 7 is NaN or infinite; .*leave it out",
    ):
        prepare(dataclasses.replace(options, dtype=dtype), no_progress)
    lines = table.read_text().splitlines(keepends=True)
    table.write_text("".join(line for line in lines if not line.startswith("utt3 ")))  # as the line advises
    prepared(dataclasses.replace(options, dtype=dtype))


def test_a_damaged_archive_is_refused_and_leaves_nothing(options: PrepareOptions) -> None:
    archive = kaldi_of(options)[0] / "feats.ark"
    archive.write_bytes(archive.read_bytes()[:-5])
    with pytest.raises(ConfigError, match=r"feats\.ark: utterance utt7, byte \d+: a matrix of 3 x 5 should"):
        prepare(options, no_progress)
    assert not options.data.exists()


def test_pdfs_without_a_model(options: PrepareOptions) -> None:
    pdfs = write_alignments(
        options.data.with_name("pdfs.ark"), {u: pdfs_of(u) for u in ALIGNMENTS}, text=True
    )
    result = prepared(changed(options, ali=None, ali_pdf=pdfs))
    assert result.dataset.num_classes == 1 + max(max(pdfs_of(u)) for u in ALIGNMENTS)
    assert len(result.notices) == 1 and "pdfs, by the largest in" in result.notices[0]
    for name, utterance in utterances_of(result.dataset).items():
        assert utterance.targets.tolist() == pdfs_of(name)
    few = write_alignments(
        options.data.with_name("few.ark"), {u: [0] * len(ALIGNMENTS[u]) for u in ALIGNMENTS}
    )
    counted = changed(options, ali_pdf=few, overwrite=True)
    assert prepared(counted).dataset.num_classes == 6  # as the model says, not as occurs


@pytest.mark.parametrize("snip_edges", [True, False])
@pytest.mark.parametrize("stored", ["features", "audio"])
def test_audio_gets_as_many_frames_as_kaldi_made(tmp_path: Path, snip_edges: bool, stored: str) -> None:
    folder = kaldi_folder(tmp_path / "kaldi", num_utterances=4)
    config = FeatureConfig(num_mel_bins=20, dtype="float32", snip_edges=snip_edges)
    waves = {f"utt{n}": read_audio(folder / "wav" / f"utt{n}.wav", 8000) for n in range(4)}
    lengths = {u: num_frames_of(len(samples), 8000, config) for u, samples in waves.items()}
    assert set(lengths.values()) == ({48} if snip_edges else {50})  # of half a second
    ali = ali_dir(tmp_path / "ali", alignments_for(lengths))  # tells of snip_edges
    options = PrepareOptions(
        (tmp_path / "data",),
        from_kaldi=KaldiOptions(kaldi=folder, ali=ali),
        split=NO_SPLIT,
        shards=1,
        num_mel_bins=20,
        dtype="float32",
        store=stored,  # type: ignore[arg-type]
    )
    dataset = prepared(options).dataset
    assert dataset.features == config and dataset.sampling_rate == 8000
    for name, utterance in utterances_of(dataset).items():
        assert len(utterance.targets) == lengths[name]
        if isinstance(utterance, AudioUtterance):
            np.testing.assert_array_equal(utterance.samples, np.round(waves[name] * 32768))
        else:
            np.testing.assert_array_equal(utterance.features, compute_features(waves[name], 8000, config))


def test_audio_of_another_frame_shift_is_refused(tmp_path: Path) -> None:
    folder = kaldi_folder(tmp_path / "kaldi", num_utterances=2)
    ali = ali_dir(tmp_path / "ali", {"utt0": some_path(48), "utt1": some_path(47)})
    options = PrepareOptions((tmp_path / "data",), from_kaldi=KaldiOptions(kaldi=folder, ali=ali))
    with pytest.raises(ConfigError, match="utterance utt1: 48 frames of features, 47 in its alignment"):
        prepare(options, no_progress)


def test_segments_are_cut_out_of_audio_as_kaldi_cuts_them(tmp_path: Path) -> None:
    folder = kaldi_folder(tmp_path / "kaldi", num_utterances=2)
    write_tone(folder / "wav" / "rec.wav", 2.0)
    (folder / "wav.scp").write_text("rec wav/rec.wav\n")
    (folder / "segments").write_text("utt0 rec 0 0.5\nutt1 rec 0.5 2.3\n")
    ali = ali_dir(tmp_path / "ali", {"utt0": some_path(48), "utt1": some_path(148)})  # snip_edges
    kaldi = KaldiOptions(kaldi=folder, ali=ali)
    dataset = prepared(PrepareOptions((tmp_path / "data",), from_kaldi=kaldi, split=NO_SPLIT)).dataset
    found = utterances_of(dataset)
    assert dataset.features.snip_edges and {u: len(f.targets) for u, f in found.items()} == {
        "utt0": 48,
        "utt1": 148,
    }
    samples = read_audio(folder / "wav" / "rec.wav", 8000)[4000:]
    expected = compute_features(samples, 8000, dataset.features).astype(np.float16)
    np.testing.assert_array_equal(found["utt1"].content, expected)


def test_segments_are_cut_out_of_features_of_recordings(options: PrepareOptions) -> None:
    folder = kaldi_of(options)[0]
    long = np.concatenate(list(FEATURES.values()))  # 93 frames
    write_feats(folder, {"rec": long, "unused": long[:5]})
    # Times are rounded to frames, up and down, as Kaldi's extract-feature-segments does.
    ends = [end / 100 + 0.004 * (-1) ** n for n, end in enumerate(np.cumsum([0, *LENGTHS]))]
    lines = [f"utt{n} rec {ends[n]:.3f} {ends[n + 1]:.3f}\n" for n in range(len(LENGTHS))]
    (folder / "segments").write_text("".join(lines))
    found = utterances_of(prepared(options).dataset)
    assert found.keys() == FEATURES.keys()
    for name, matrix in FEATURES.items():
        np.testing.assert_allclose(found[name].content, normalise(matrix, OF_KALDI), atol=1e-6)
    # The last one is cut where the recording ends; one that ends half a second later is refused.
    (folder / "segments").write_text("".join([*lines[:-1], f"utt7 rec {ends[7]:.3f} 1.42\n"]))
    assert (
        len(utterances_of(prepared(changed(options, overwrite=True)).dataset)["utt7"].targets) == LENGTHS[7]
    )
    (folder / "segments").write_text("".join([*lines[:-1], "utt7 rec 0.9 1.43\n"]))
    with pytest.raises(
        ConfigError, match=r"segments: utterance utt7 is frames 90 to 143 of recording rec, which has 93"
    ):
        prepare(changed(options, overwrite=True), no_progress)


def test_segments_whose_ends_kaldi_has_snipped_are_cut_so(options: PrepareOptions, tmp_path: Path) -> None:
    """As `extract-feature-segments` does by default; the alignment tells, and data like it have none."""
    folder = kaldi_of(options)[0]
    long = np.concatenate(list(FEATURES.values()))  # 93 frames
    write_feats(folder, {"rec": long})
    spans = {f"utt{n}": (8 * n, 8 * n + 20) for n in range(8)} | {"utt7": (80, 94)}
    (folder / "segments").write_text(
        "".join(f"{u} rec {first / 100 + 1e-6} {end / 100 + 1e-6}\n" for u, (first, end) in spans.items())
    )
    frames = {u: end - 2 - first for u, (first, end) in spans.items()}
    ali = ali_dir(tmp_path / "snipped", alignments_for(frames))
    dataset = prepared(changed(options, ali=ali)).dataset
    assert dataset.features.snip_edges
    found = utterances_of(dataset)
    for name, (first, end) in spans.items():
        expected = normalise(long[first : end - 2], OF_KALDI)
        np.testing.assert_allclose(found[name].content, expected, atol=1e-6)
    like = PrepareOptions(
        (tmp_path / "alike",), from_kaldi=KaldiOptions(kaldi=folder), like=dataset.path, workers=1
    )
    alike = utterances_of(prepared(like).dataset)
    assert {name: one.content.tobytes() for name, one in alike.items()} == {
        name: one.content.tobytes() for name, one in found.items()
    }
    # One that fits neither is named, with the frames of segments as they are.
    ali = ali_dir(tmp_path / "odd", alignments_for(frames | {"utt3": 19}))
    with pytest.raises(ConfigError, match=r"utterance utt.: 20 frames of features, 18 in its alignment"):
        prepare(changed(options, ali=ali, overwrite=True), no_progress)


def test_archives_of_another_machine_are_found_by_a_map(options: PrepareOptions) -> None:
    folder = kaldi_of(options)[0]
    (folder / "data").mkdir()
    (folder / "feats.ark").rename(folder / "data" / "feats.ark")
    scp = (folder / "feats.scp").read_text()
    (folder / "feats.scp").write_text(scp.replace(str(folder), "/export/exp"))
    mapping = f"/export/exp={folder / 'data'}"
    with pytest.raises(ConfigError) as caught:
        prepare(options, no_progress)
    assert str(caught.value) == f"/export/exp/feats.ark: no such file; --path-map {mapping} finds 1 of them"
    files = FilesOptions(path_map=(mapping,))
    assert len(utterances_of(prepared(changed(options, files=files)).dataset)) == len(FEATURES)


def test_archives_that_do_not_exist_are_not_said_to_be_unlisted(options: PrepareOptions) -> None:
    folder = kaldi_of(options)[0]
    scp = (folder / "feats.scp").read_text()
    (folder / "feats.scp").write_text(scp.replace(str(folder), "/gone", 1))
    result = prepared(changed(options, files=FilesOptions(skip_incomplete=True)))
    assert result.notices == (
        "left out: 1 utterance that is in feats.scp with a file that does not exist or is empty, first utt0",
    )


def test_recordings_whose_archive_does_not_exist_have_no_segments(options: PrepareOptions) -> None:
    folder = kaldi_of(options)[0]
    write_feats(folder, {"rec": np.concatenate(list(FEATURES.values()))})
    ends = np.cumsum([0, *LENGTHS])
    lines = [f"utt{n} rec {ends[n] / 100 + 1e-6} {ends[n + 1] / 100 + 1e-6}\n" for n in range(len(LENGTHS))]
    (folder / "segments").write_text("utt0 lost 0 0.1\n" + "".join(lines[1:]))
    with (folder / "feats.scp").open("a") as scp:
        scp.write("lost /gone/feats.ark:5\n")
    with pytest.raises(ConfigError, match=r"1 of 2 files do not exist, first /gone/feats\.ark; "):
        prepare(options, no_progress)
    result = prepared(changed(options, files=FilesOptions(skip_incomplete=True)))
    assert result.notices == (
        "left out: 1 utterance that is in feats.scp with a file that does not exist or is empty, first utt0",
    )


@pytest.mark.parametrize("text", ["0", "nan", "-0.01", "inf"])
def test_a_frame_shift_is_a_time(options: PrepareOptions, text: str) -> None:
    (kaldi_of(options)[0] / "frame_shift").write_text(f"{text}\n")
    with pytest.raises(ConfigError, match=f"frame_shift: '{text}' is no time between frames; write"):
        prepare(options, no_progress)


def test_features_have_no_channels(options: PrepareOptions) -> None:
    like = prepared(options).dataset.path
    kaldi = KaldiOptions(kaldi=kaldi_of(options)[0])
    scored = PrepareOptions(
        (options.data.with_name("test"),), from_kaldi=kaldi, like=like, files=FilesOptions(channel=1)
    )
    with pytest.raises(ConfigError, match=r"--channel: the model of --like .* was trained on Kaldi's feat"):
        prepare(scored, no_progress)


def test_another_frame_shift_than_kaldis_is_refused(options: PrepareOptions) -> None:
    """The option had no effect, and a model scored features of another frame shift than its own."""
    shift = kaldi_of(options)[0] / "frame_shift"
    shift.write_text("0.01\n")
    with pytest.raises(ConfigError, match="has 10 ms between frames, --frame-shift-ms is 30; leave"):
        prepare(dataclasses.replace(options, frame_shift_ms=30.0), no_progress)
    like = prepared(dataclasses.replace(options, frame_shift_ms=10.0)).dataset
    shift.write_text("0.03\n")
    kaldi = KaldiOptions(kaldi=kaldi_of(options)[0])
    scored = PrepareOptions((options.data.with_name("test"),), from_kaldi=kaldi, like=like.path)
    with pytest.raises(ConfigError, match=r"has 30 ms between frames, the model of --like .* has 10; give"):
        prepare(scored, no_progress)
    shift.unlink()
    assert prepared(scored).dataset.features.frame_shift_ms == 10


def test_a_file_that_cannot_be_read_is_not_one_that_cannot_be_written(
    options: PrepareOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied", "kaldi/frame_shift")

    monkeypatch.setattr(pipeline, "read_kaldi", refused)
    with pytest.raises(
        ConfigError, match=r"^kaldi/frame_shift: cannot be read \(Permission denied\); make it readable"
    ):
        prepare(options, no_progress)


def test_yesno_as_kaldi_aligned_it(tmp_path: Path) -> None:
    kaldi = KaldiOptions(kaldi=yesno_data_dir(tmp_path / "kaldi"), ali=yesno_system())
    options = PrepareOptions((tmp_path / "data",), from_kaldi=kaldi, split="random:dev=0.2", shards=2)
    result = prepared(options)
    dataset = result.dataset
    assert dataset.features.snip_edges and dataset.num_classes == 11 and result.notices == ()
    assert sum(split.frames for split in dataset.splits.values()) == 18996
    assert sum(split.utterances for split in dataset.splits.values()) == 31
    dataset.verify()


def test_disk_errors_while_gathering_are_shard_errors(
    options: PrepareOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_file(*arguments: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    original = Path.open
    monkeypatch.setattr(
        Path, "open", lambda path, *a, **k: no_file() if path.name == "pdfs.tmp" else original(path, *a, **k)
    )
    with pytest.raises(ShardError, match=r"pdfs\.tmp: cannot be written \(No space left on device\)"):
        prepare(options, no_progress)
    assert not options.data.exists()


def test_jobs_report_progress_up_to_all(options: PrepareOptions) -> None:
    seen: list[tuple[str, int, int]] = []
    prepare(options, lambda *report: seen.append(report))
    assert seen[-1] == ("writing shards", 8, 8) and seen[0] == ("reading alignments", 1, 8)
    assert run_jobs([], "nothing", 1, no_progress) == []


def test_the_command_line(options: PrepareOptions, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "prepare",
        "--kaldi",
        kaldi_of(options)[0],
        "--ali",
        kaldi_of(options)[1],
        options.data,
        "--split",
        NO_SPLIT,
    ]
    arguments = [str(word) for word in words]
    assert speechdp([*arguments, "--feats"]) == 0
    printed = capsys.readouterr().out
    assert "kaldi x 5 float16, 25 ms every 10 ms, mean and variance normalised" in printed
    assert " Hz" not in printed and "6 classes, kaldi alignment" in printed
    for extra, reason in {
        ("--overwrite", "--feats", "--resample", "8000"): "--resample does not go with --kaldi",
        ("--overwrite", "--feats", "--store", "audio"): "leave one of them out",
        ("--overwrite", "--cmvn", "kaldi"): "add --feats",
        ("--overwrite",): "wav.scp: cannot be read",
        ("--like", "x"): "leave --ali and --ali-pdf out",
    }.items():
        assert speechdp([*arguments, *extra]) == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("speechdp: ") and reason in error
    assert speechdp(["prepare", "--kaldi", str(kaldi_of(options)[0]), str(options.data)]) == 1
    assert "--kaldi needs the alignment" in capsys.readouterr().err
    assert speechdp(["prepare", "--feats", str(kaldi_of(options)[0]), str(options.data)]) == 1
    assert "go with --kaldi" in capsys.readouterr().err


def test_data_without_an_alignment_are_made_like_those_trained_on(options: PrepareOptions) -> None:
    like = prepared(changed(options, variance_normalise=False)).dataset
    other = PrepareOptions(
        (options.data.with_name("test"),),
        from_kaldi=KaldiOptions(kaldi=kaldi_of(options)[0]),
        like=like.path,
        shards=4,
    )
    result = prepared(other)
    dataset = result.dataset
    assert result.notices == () and dataset.alignment == "none" and dataset.split_names == ("test",)
    assert (dataset.features, dataset.num_classes) == (like.features, 6)
    trained, scored = utterances_of(like), utterances_of(dataset)
    assert trained.keys() == scored.keys()
    for name, utterance in scored.items():
        np.testing.assert_array_equal(utterance.content, trained[name].content)
        assert not utterance.targets.any()
    with pytest.raises(ConfigError, match="have no alignment; leave --ali and --ali-pdf out, or, to train"):
        changed(other, ali=kaldi_of(options)[1])
    with pytest.raises(ConfigError, match="or, to score data without one, only --like RUN"):
        dataclasses.replace(other, like=None)


def test_audio_is_not_kept_for_a_model_of_kaldis_features(options: PrepareOptions) -> None:
    like = prepared(options).dataset
    other = PrepareOptions(
        (options.data.with_name("test"),), from_kaldi=KaldiOptions(kaldi=kaldi_of(options)[0]), like=like.path
    )
    with pytest.raises(
        ConfigError, match=r"--store audio: the model of --like was trained on Kaldi's features"
    ):
        prepare(dataclasses.replace(other, store="audio"), no_progress)


def test_kaldis_features_are_not_taken_for_a_model_of_computed_ones(
    options: PrepareOptions, tmp_path: Path
) -> None:
    like = prepared(options).dataset
    file = like.path / "data.json"
    values = json.loads(file.read_text())
    values["features"] |= {"kind": "log_mel", "num_mel_bins": 5}
    del values["features"]["kaldi_dim"]
    file.write_text(json.dumps(values))
    kaldi = KaldiOptions(kaldi=kaldi_of(options)[0], feats=True)
    with pytest.raises(
        ConfigError, match=r"--feats: the model of --like .* computed from audio; leave --feats out"
    ):
        prepare(PrepareOptions((tmp_path / "test",), from_kaldi=kaldi, like=like.path), no_progress)


def test_audio_files_of_no_byte_can_be_left_out(tmp_path: Path) -> None:
    folder = kaldi_folder(tmp_path / "kaldi", num_utterances=3)
    ali = ali_dir(tmp_path / "ali", {f"utt{n}": some_path(48) for n in range(3)})
    (folder / "wav" / "utt1.wav").write_bytes(b"")
    given = PrepareOptions(
        (tmp_path / "data",), from_kaldi=KaldiOptions(kaldi=folder, ali=ali), split=NO_SPLIT, workers=1
    )
    with pytest.raises(
        ConfigError, match=r"1 of 3 audio files are empty .* leave them out with --skip-incomplete"
    ):
        prepare(given, no_progress)
    result = prepared(changed(given, files=FilesOptions(skip_incomplete=True)))
    assert result.dataset.num_utterances("train") == 2
    assert "with a file that does not exist or is empty, first utt1" in result.notices[0]
    (folder / "wav" / "utt1.wav").write_bytes(b"no audio")
    with pytest.raises(
        ConfigError, match=r"utt1\.wav: unreadable .* leave it out, as --skip-incomplete does"
    ):
        prepare(changed(given, overwrite=True), no_progress)
    result = prepared(changed(given, files=FilesOptions(skip_incomplete=True), overwrite=True))
    assert result.dataset.num_utterances("train") == 2
    assert result.notices[0] == "left out: 1 utterance that has unreadable audio, first utt1"
    (folder / "segments").write_text("utt0 utt0 0 -1\nutt1 utt0 9 10\nutt2 utt2 0 -1\n")
    with pytest.raises(ConfigError, match=r"utt1 of .*: the recording ends at 0\.5 s; correct the times"):
        prepare(changed(given, overwrite=True), no_progress)
    result = prepared(changed(given, files=FilesOptions(skip_incomplete=True), overwrite=True))
    assert result.dataset.num_utterances("train") == 2
    assert result.notices[0] == "left out: 1 utterance that has times outside of the recording, first utt1"


def test_audio_without_an_alignment_needs_the_rate_trained_on(tmp_path: Path) -> None:
    folder = kaldi_folder(tmp_path / "kaldi", num_utterances=2)
    ali = ali_dir(tmp_path / "ali", {"utt0": some_path(48), "utt1": some_path(48)})
    kaldi = KaldiOptions(kaldi=folder, ali=ali)
    like = PrepareOptions((tmp_path / "data",), from_kaldi=kaldi, split=NO_SPLIT)
    assert prepared(like).dataset.features.snip_edges
    other = PrepareOptions((tmp_path / "test",), from_kaldi=KaldiOptions(kaldi=folder), like=like.data)
    assert prepared(other).dataset.num_frames("test") == 96
    write_tone(folder / "wav" / "utt1.wav", sampling_rate=16000)
    with pytest.raises(ConfigError, match=r"utt1\.wav: has 16000 Hz, the data of --like have 8000 Hz"):
        prepare(changed(other, overwrite=True), no_progress)


def test_decoding_such_data_is_refused_with_the_remedy(options: PrepareOptions) -> None:
    dataset = prepared(options).dataset
    with pytest.raises(
        ConfigError, match="targets are Kaldi pdfs; write posteriors with speechdp posteriors"
    ):
        decode_split(oracle(6), dataset, "train", options.data, DecodingOptions(), SerialCommunicator())


def test_class_lists_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "classes.txt"
    KaldiPdfs(3).save(path)
    assert path.read_text() == "0 pdf-0\n1 pdf-1\n2 pdf-2\n"
    assert load_classes(path).sha256 == KaldiPdfs(3).sha256 != KaldiPdfs(4).sha256
    for text in ("0 pdf-0\n2 pdf-2\n", "0 pdf-0\n1 pdf-1", ""):
        path.write_text(text)
        with pytest.raises(ConfigError, match="not a class list of speechdp"):
            load_classes(path)
