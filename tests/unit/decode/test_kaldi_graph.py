"""decode --graph: Kaldi's HCLG.fst with a model trained on its pdfs."""

from __future__ import annotations

import json
from pathlib import Path

import kaldifst
import numpy as np
import pytest

from speechdp.cli.decode import DecodeCommand
from speechdp.comm.serial import SerialCommunicator
from speechdp.data.shards.dataset import Dataset, Manifest, ShardEntry, SplitEntry
from speechdp.data.shards.shard import ShardHeader, ShardWriter, Utterance
from speechdp.data.signal.features import FeatureConfig
from speechdp.decode.graphs.kaldi_graph import KaldiGraphFiles, read_kaldi_graph
from speechdp.decode.recogniser import DecodingOptions
from speechdp.decode.split import decode_split
from speechdp.decode.tuning import tune
from speechdp.errors import ConfigError
from speechdp.labels.kaldi_pdfs import KaldiPdfs
from speechdp.options.recognition import RecognitionOptions
from tests.helpers.kaldi_files import PDFS_OF_TUPLES, text_model
from tests.helpers.oracle import FEATURES, Spoken, oracle, write_dataset

NUM_PDFS = max(PDFS_OF_TUPLES) + 1
#: Transition-ids of "yes" and "no": a loop, then what leaves; see kaldi_files.STATES.
YES, NO = (2, 1), (5, 4, 6, 7)


@pytest.fixture
def files(tmp_path: Path) -> KaldiGraphFiles:
    """Write DIR/graph/HCLG.fst of any sequence of "yes" and "no", words.txt and DIR/final.mdl."""
    folder = tmp_path / "tri1" / "graph"
    folder.mkdir(parents=True)
    (folder.parent / "final.mdl").write_bytes(text_model(tuples=True))
    (folder / "words.txt").write_text("<eps> 0\nyes 1\nno 3\n#0 4\n")
    fst = kaldifst.StdVectorFst()
    fst.start = hub = fst.add_state()
    fst.set_final(hub, 0.25)
    for word, ids in ((1, YES), (3, NO)):
        source = hub
        for number, label in enumerate(ids):
            target = hub if number == len(ids) - 1 else fst.add_state()
            fst.add_arc(source, kaldifst.StdArc(label, word if number == 0 else 0, 0.5, target))
            source = target
    kaldifst.StdConstFst(fst).write(str(folder / "HCLG.fst"))  # as mkgraph.sh leaves it
    return KaldiGraphFiles.of(folder / "HCLG.fst", None, None)


def write_fst(path: Path, text: str) -> None:
    kaldifst.compile(text, acceptor=False).write(str(path))


def pdfs_of(*words: str) -> list[int]:
    return [PDFS_OF_TUPLES[i - 1] for word in words for i in (YES if word == "yes" else NO)]


def write_pdf_dataset(
    path: Path, said: dict[str, tuple[str, ...]], rate: int = 8000, config: FeatureConfig = FEATURES
) -> Dataset:
    """Write a data directory of Kaldi's pdfs whose frames are those of words."""
    path.mkdir()
    KaldiPdfs(NUM_PDFS).save(path / "classes.txt")
    header = ShardHeader(config, rate, NUM_PDFS, "kaldi", "test")
    with ShardWriter(path / "test-00000.h5", header) as writer:
        for utterance, words in said.items():
            pdfs = pdfs_of(*(words or ("yes",)))
            features = np.zeros((len(pdfs), config.feature_dim), np.float32)
            features[:, 0] = pdfs
            writer.add(Utterance(utterance, "s", " ".join(words), features, np.array(pdfs, np.int32)))
    split = SplitEntry.of([ShardEntry.of(writer)], ["s"])
    Manifest(rate, config, NUM_PDFS, "kaldi", "given", {"test": split}).write(path)
    return Dataset.open(path)


def test_graph_reads_pdfs_in_place_of_transition_ids(files: KaldiGraphFiles) -> None:
    graph = read_kaldi_graph(files, NUM_PDFS)
    assert graph.words == ("yes", "", "no", "#0")
    arcs = [arc for s in range(graph.num_states) for arc in kaldifst.ArcIterator(graph.fst, s)]
    assert sorted(arc.ilabel - 1 for arc in arcs) == sorted(pdfs_of("yes", "no"))
    assert {arc.olabel for arc in arcs} == {0, 1, 3}


def test_what_was_said_is_recognised(files: KaldiGraphFiles, tmp_path: Path) -> None:
    said = {"a": ("yes", "no"), "b": ("no", "no", "yes"), "c": ("yes",)}
    dataset = write_pdf_dataset(tmp_path / "data", said)
    options = DecodingOptions(graph=files)
    result = decode_split(oracle(NUM_PDFS), dataset, "test", tmp_path / "run", options, SerialCommunicator())
    assert result.wer.wer == 0 and result.unknown_words == 0
    values = json.loads((tmp_path / "run" / "wer-test.json").read_text())
    assert values["grammar"] == "graph" and values["graph"]["graph"] == str(files.graph)
    assert values["graph"]["states"] == 5 and "graph" not in values["options"]
    tuned = tune(oracle(NUM_PDFS), dataset, "test", options, SerialCommunicator())
    assert set(tuned.record["chosen"]) == {"acoustic_scale", "prior_scale"}


def test_kaldis_own_features_are_timed_by_their_frame_shift(
    files: KaldiGraphFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As `prepare --kaldi --feats` makes them: nobody knows the sampling rate."""
    config = FeatureConfig(kind="kaldi", kaldi_dim=4, frame_shift_ms=20.0, dtype="float32")
    dataset = write_pdf_dataset(tmp_path / "data", {"a": ("yes", "no") * 25}, 0, config)
    num_frames = len(pdfs_of(*("yes", "no") * 25))
    monkeypatch.setattr("speechdp.tasks.model_file.load_model", lambda *_, **__: oracle(NUM_PDFS))
    command = DecodeCommand(tmp_path / "run", dataset.path, graph=files.graph, backend="serial", device="cpu")
    command._on_rank(SerialCommunicator())
    assert f", {num_frames * 0.02:.1f} s of speech; " in capsys.readouterr().out


def test_a_split_without_transcripts_is_left_to_kaldi(files: KaldiGraphFiles, tmp_path: Path) -> None:
    dataset = write_pdf_dataset(tmp_path / "data", {"a": ()})
    options, comm = DecodingOptions(graph=files), SerialCommunicator()
    with pytest.raises(ConfigError, match=r"count errors by; write its scores with speechdp posteriors$"):
        decode_split(oracle(NUM_PDFS), dataset, "test", tmp_path / "run", options, comm)


def test_what_was_tuned_for_graphs_is_used_with_a_graph(
    files: KaldiGraphFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dataset = write_pdf_dataset(tmp_path / "data", {"a": ("yes", "no")})
    monkeypatch.setattr("speechdp.tasks.model_file.load_model", lambda *_, **__: oracle(NUM_PDFS))
    where = {"graph": files.graph, "backend": "serial", "device": "cpu"}
    run_dir = tmp_path / "run"
    DecodeCommand(run_dir, dataset.path, tune_on="test", **where)._on_rank(SerialCommunicator())  # type: ignore[arg-type]
    tuned = json.loads((run_dir / "wer-test.json").read_text())["options"]
    tuned["acoustic_scale"] = 0.25
    record = json.loads((run_dir / "tuned.json").read_text())
    (run_dir / "tuned.json").write_text(json.dumps({**record, "options": tuned}))
    capsys.readouterr()
    DecodeCommand(run_dir, dataset.path, **where)._on_rank(SerialCommunicator())  # type: ignore[arg-type]
    assert "as decode --tune-on test chose them" in capsys.readouterr().err
    assert json.loads((run_dir / "wer-test.json").read_text())["options"]["acoustic_scale"] == 0.25


def test_files_that_do_not_belong_together_are_refused(files: KaldiGraphFiles, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"final\.mdl: has 6 pdfs, the model to decode with 9"):
        read_kaldi_graph(files, 9)
    files.words.write_text("yes 1\n")
    with pytest.raises(ConfigError, match=r"HCLG\.fst: label 5:3 is none of "):
        read_kaldi_graph(files, NUM_PDFS)
    files.words.unlink()
    with pytest.raises(ConfigError, match=r"words\.txt: cannot be read .*; check the path$"):
        read_kaldi_graph(files, NUM_PDFS)
    dataset = write_dataset(tmp_path / "phones", [[Spoken("a", "one", "one")]])
    with pytest.raises(ConfigError, match="has states of phones as classes"):
        decode_split(
            oracle(dataset.num_classes),
            dataset,
            "test",
            tmp_path / "run",
            DecodingOptions(graph=files),
            SerialCommunicator(),
        )


def test_a_grammar_is_no_graph(files: KaldiGraphFiles, tmp_path: Path) -> None:
    """As arpa2fst --disambig-symbol=#0 makes it: back-off reads #0 and writes nothing."""
    files.model.unlink()  # mkgraph.sh has not been run: there is no final.mdl where Kaldi would put it
    write_fst(files.graph, "0 0 1 1 0.5\n0 0 3 3\n0 1 4 0\n1 0 1 1\n0")
    with pytest.raises(
        ConfigError,
        match=r"HCLG\.fst: is a grammar of words \(G\.fst\), .*; give the HCLG\.fst .*--lm G\.fst",
    ):
        read_kaldi_graph(files, NUM_PDFS)
    dataset = write_dataset(tmp_path / "phones", [[Spoken("a", "one", "one")]])
    options, comm = DecodingOptions(graph=files), SerialCommunicator()
    with pytest.raises(ConfigError, match=r"leave --graph out \(prepare --lm takes a G\.fst\)$"):
        decode_split(oracle(dataset.num_classes), dataset, "test", tmp_path / "run", options, comm)


@pytest.mark.parametrize(
    ("graph", "label"),
    [
        ("0 1 3 1\n1 2 4 0\n2", 4),  # ends with a step to phone 2's second state
        ("0 1 0 1\n1 2 6 0\n2 3 7 3\n3 4 0 0\n4", 6),  # begins with phone 2's second state
        ("0 1 5 1\n1 2 4 3\n2", 4),  # as the phones of an L.fst
    ],
)
def test_labels_that_are_no_paths_of_the_model_are_refused(
    files: KaldiGraphFiles, graph: str, label: int
) -> None:
    write_fst(files.graph, graph)
    with pytest.raises(
        ConfigError,
        match=rf"HCLG\.fst: no path of .*final\.mdl begins .* transition-id {label}; give an HCLG",
    ):
        read_kaldi_graph(files, NUM_PDFS)


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for options, about in (
        ({"words": Path("words.txt")}, "go with --graph"),
        ({"graph": Path("HCLG.fst"), "grammar": "word-loop"}, "replaces --grammar word-loop"),
        *(
            (
                {"graph": Path("HCLG.fst"), "search": RecognitionOptions(**{name: 0.5})},
                f"^--{name.replace('_', '-')} has no effect with --graph",
            )
            for name in ("lm_scale", "insertion_log_prob", "silence_probability")
        ),
        (
            {"grammar": "word", "search": RecognitionOptions(insertion_log_prob=0.5)},
            "^--insertion-log-prob has no effect with --grammar word",
        ),
        (
            {"grammar": "word-loop", "search": RecognitionOptions(lm_scale=0.5)},
            "^--lm-scale has no effect with --grammar word-loop",
        ),
    ):
        with pytest.raises(ConfigError, match=about):
            DecodeCommand(tmp_path, tmp_path, **options).run()  # type: ignore[arg-type]
