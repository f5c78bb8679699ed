"""From Kaldi's alignment to scores that Kaldi's search aligns as Kaldi did: yesno, trained on two ranks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import kaldi_native_io
import kaldifst
import numpy as np
import numpy.typing as npt
import pytest

from speechdp.cli.main import run as speechdp
from speechdp.data.kaldi.alignments import alignment_source
from speechdp.data.shards.dataset import Dataset
from speechdp.decode.graphs.graph import DecodingGraph
from speechdp.decode.search import Searcher
from tests.helpers.corpora import shared_data
from tests.helpers.jobs import DEADLINE_S, alone, by_launch, ended_within
from tests.helpers.kaldi_files import yesno_data_dir, yesno_system
from tests.helpers.kaldi_graph import make_graph

#: Kaldi's data/lang/words.txt numbers the words.
WORDS = ("<SIL>", "NO", "YES")
OPTIONS = ("--layers", "1", "--cells", "32", "--epochs", "5", "--batch-size", "2", "--learning-rate", "0.01")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("kaldi")
    kaldi = yesno_data_dir(folder / "train_yesno")
    command = alone("prepare", "--kaldi", kaldi, "--ali", yesno_system(), folder / "data", "--shards", "2")
    ended = ended_within(DEADLINE_S, [*command, "--split", "random:dev=0.2"])
    assert ended.exit_code == 0, ended.output
    assert "11 classes, kaldi alignment" in ended.stdout and "left out" not in ended.stdout
    return Dataset.open(folder / "data")


@pytest.fixture(scope="module")
def run(data: Dataset) -> Path:
    run = data.path.with_name("run")
    ended = ended_within(DEADLINE_S, by_launch(2, "train", data.path, run, *OPTIONS, "--backend", "mpi"))
    assert ended.exit_code == 0, ended.output
    return run


@pytest.fixture(scope="module")
def scores(data: Dataset, run: Path) -> dict[str, npt.NDArray[np.float32]]:
    """The scaled log-likelihoods of the held-out part, read by kaldi_native_io."""
    ark, scp = run.with_name("dev.ark"), run.with_name("dev.scp")
    command = alone("posteriors", run, data.path, "--split", "dev", "-o", ark, "--scp", scp)
    ended = ended_within(DEADLINE_S, command)
    assert ended.exit_code == 0, ended.output
    assert ended.stdout == f"{ark}: 7 utterances, 4,304 frames, 11 classes, log_likelihood\n"
    with kaldi_native_io.SequentialFloatMatrixReader(f"scp:{scp}") as reader:
        return {key: np.array(matrix) for key, matrix in reader}


def kaldis_pdfs() -> dict[str, npt.NDArray[np.int32]]:
    return dict(alignment_source(yesno_system(), None).pdfs())


def test_the_best_pdf_of_a_frame_is_mostly_kaldis(scores: dict[str, npt.NDArray[np.float32]]) -> None:
    aligned = kaldis_pdfs()
    assert all(scores[name].shape == (len(aligned[name]), 11) for name in scores)
    hits = np.concatenate([scores[name].argmax(axis=1) == aligned[name] for name in scores])
    assert hits.mean() > 0.7  # the most frequent pdf has 29 % of the frames


def test_kaldis_training_graphs_and_search_find_kaldis_alignment(
    scores: dict[str, npt.NDArray[np.float32]], tmp_path: Path
) -> None:
    pdf_map = alignment_source(yesno_system(), None).pdf_map
    assert pdf_map is not None
    aligned = kaldis_pdfs()
    graphs = tmp_path / "fsts.ark"
    graphs.write_bytes(gzip.decompress((yesno_system() / "fsts.1.gz").read_bytes()))
    hits, reader = [], kaldifst.SequentialVectorFstReader(f"ark:{graphs}")
    while not reader.done:
        if reader.key in scores:
            # The graphs read transition-ids, which start at 1: one column for each.
            by_transition = np.ascontiguousarray(scores[reader.key][:, pdf_map.pdfs[1:]])
            path = Searcher(DecodingGraph(reader.value.copy(), WORDS)).search(by_transition)
            assert path is not None
            assert path.words == tuple("YES" if digit == "1" else "NO" for digit in reader.key.split("_"))
            hits.append(pdf_map.pdfs[path.classes + 1] == aligned[reader.key])
        reader.next()
    assert len(hits) == len(scores)
    assert np.concatenate(hits).mean() > 0.8


def test_kaldis_graph_finds_the_words(data: Dataset, run: Path) -> None:
    """HCLG.fst of Kaldi's own G, lexicon and model: as likely to be "yes" as "no", in any order."""
    lang = shared_data("kaldi", "yesno_keighrim", "data", "lang_test_tg")
    graph, model = run.with_name("HCLG.fst"), yesno_system() / "final.mdl"
    make_graph(lang, model, graph)
    files = ("--graph", graph, "--words", lang / "words.txt", "--mdl", model)
    ended = ended_within(DEADLINE_S, alone("decode", run, data.path, "--split", "dev", *files))
    assert ended.exit_code == 0, ended.output
    assert json.loads((run / "wer-dev.json").read_text())["wer"] < 0.1
    hypotheses = (run / "hypotheses" / "dev.txt").read_text().splitlines()
    assert len(hypotheses) == 7 and {word for line in hypotheses for word in line.split()[1:]} == {
        "YES",
        "NO",
    }
    for wrong, remedy in (("G.fst", "give the HCLG.fst that"), ("L.fst", r"give an HCLG.fst (no L.fst)")):
        command = alone("decode", run, data.path, "--split", "dev", "--graph", lang / wrong, *files[2:])
        ended = ended_within(DEADLINE_S, command)
        (line,) = [line for line in ended.stderr.splitlines() if line.startswith("speechdp: ")]
        assert ended.exit_code == 1 and remedy in line


def test_data_without_an_alignment_are_scored_as_with_one(
    data: Dataset, run: Path, scores: dict[str, npt.NDArray[np.float32]]
) -> None:
    kaldi, test, ark = (run.with_name(name) for name in ("train_yesno", "test", "test.ark"))
    ended = ended_within(DEADLINE_S, alone("prepare", "--kaldi", kaldi, "--like", data.path, test))
    assert ended.exit_code == 0, ended.output
    ended = ended_within(DEADLINE_S, alone("posteriors", run, test, "-o", ark))
    assert ended.exit_code == 0, ended.output
    with kaldi_native_io.SequentialFloatMatrixReader(f"ark:{ark}") as reader:
        found = {key: np.array(matrix) for key, matrix in reader}
    assert len(found) == 31
    for name, expected in scores.items():
        np.testing.assert_allclose(found[name], expected, atol=1e-4)
    ended = ended_within(DEADLINE_S, alone("train", test, run.with_name("other"), "--train-split", "test"))
    assert ended.exit_code == 1 and "has no alignment (prepare --like)" in ended.stderr


@pytest.mark.parametrize(
    ("command", "what", "remedy"),
    [
        (["decode", "RUN", "DATA", "--split", "dev"], "decode", "write posteriors with speechdp posteriors"),
        (["train", "DATA", "OTHER", "--realign", "1"], "--realign", "leave it out"),
        (["train", "DATA", "OTHER", "--flat-start"], "--flat-start", "leave it out"),
        (["sweep", "DATA", "OTHER", "--epochs", "1"], "--decode-split", "write posteriors"),
    ],
)
def test_what_needs_pronunciations_is_refused_at_once(
    data: Dataset, run: Path, command: list[str], what: str, remedy: str
) -> None:
    other = run.with_name("other")
    names = {"RUN": run, "DATA": data.path, "OTHER": other}
    ended = ended_within(DEADLINE_S, alone(*(names.get(word, word) for word in command)))
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("speechdp: ")]
    assert ended.exit_code == 1 and line.startswith(f"speechdp: {what}")
    assert f"targets are Kaldi pdfs; {remedy}" in line
    assert not (other / "run.json").exists()


def test_a_comparison_that_decodes_is_refused_before_it_trains(
    data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert speechdp(["compare", str(data.path), str(out), "--strategies", "gradient_averaging"]) == 1
    assert "targets are Kaldi pdfs" in capsys.readouterr().err
    assert not out.exists()


def test_kaldis_compressed_features_with_pdfs_by_file(tmp_path: Path) -> None:
    source = shared_data("kaldi", "lhotse_mini_librispeech2")
    frames = dict(line.split() for line in (source / "utt2num_frames").read_text().splitlines())
    pdfs = tmp_path / "pdfs.txt"  # as ali-to-pdf writes it with ark,t
    pdfs.write_text(
        "".join(
            f"{u} {' '.join(['0', '1'] * (int(n) // 2) + ['2'] * (int(n) % 2))} \n" for u, n in frames.items()
        )
    )
    data = tmp_path / "data"
    arguments = ["prepare", "--kaldi", source, "--feats", "--ali-pdf", pdfs, data, "--split", "random:dev=0"]
    ended = ended_within(DEADLINE_S, alone(*arguments))
    assert ended.exit_code == 0, ended.output
    assert "kaldi x 13 float16" in ended.stdout and "3 pdfs, by the largest in" in ended.stdout
    dataset = Dataset.open(data)
    dataset.verify()
    assert dataset.num_frames("train") == sum(map(int, frames.values()))
    with dataset.open_shard("train", 0) as shard:
        assert shard.text(0).isupper()
