"""The page of a decoding: what it shows of the errors, the audio, and hostile words and names."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Sequence
from pathlib import Path

import pytest
import soundfile
from rich.console import Console

from speechdp.cli.decode import DecodeCommand
from speechdp.decode.wer import AlignedWord, align_words
from speechdp.errors import RunError
from speechdp.report.decoding import page as page_module
from speechdp.report.decoding.mistakes import (
    AlignedUtterance,
    Confusion,
    LostOrAdded,
    confusions,
    lost_and_added,
    worst,
)
from speechdp.report.decoding.page import write_decoding_page
from speechdp.report.kit.pages import WrittenReport
from tests.helpers.decodings import RATE, Heard, data_of, decoding_of
from tests.helpers.page_reader import PageReader, words_of

SCRIPT = "<script>alert('x')<!--&\"[bold red]"

UTTERANCES = (
    Heard("a-1", "ann", "go left now", "go right now"),
    Heard("a-2", "ann", "go left", "right left"),
    Heard("b-1", "bob", "stop here", "stop here"),
    Heard("b-2", "bob", "left", "right right"),
    Heard("b-3", "bob", "now go", "go"),
)


def written(tmp_path: Path, heard: Sequence[Heard] = UTTERANCES, *, audio: bool = False) -> WrittenReport:
    run = tmp_path / "run"
    return write_decoding_page(decoding_of(heard, run), data_of(heard, tmp_path / "data", audio=audio), run)


def aligned(*pairs: tuple[str, str]) -> list[AlignedUtterance]:
    words = align_words([said for said, _ in pairs], [heard for _, heard in pairs])
    return [AlignedUtterance(f"u{number}", "", line) for number, line in enumerate(words)]


def test_confusions_and_lost_words_are_counted_the_most_frequent_first() -> None:
    utterances = aligned(("a b c", "a x c"), ("b", "x"), ("b d", "b"), ("c", "c e"), ("c", "d"), ("d", ""))
    assert confusions(utterances, 9) == [Confusion("b", "x", 2, 3), Confusion("c", "d", 1, 3)]
    assert confusions(utterances, 1) == [Confusion("b", "x", 2, 3)]
    assert lost_and_added(utterances, 9) == [LostOrAdded("d", 2, 0, 2), LostOrAdded("e", 0, 1, 0)]


def test_the_worst_utterances_have_most_errors_and_among_equals_fewest_words() -> None:
    utterances = aligned(("a b c", "a b x"), ("a", "b"), ("a b", ""), ("a", "a"))
    assert [one.utterance_id for one in worst(utterances, 9)] == ["u2", "u1", "u0"]
    assert [one.utterance_id for one in worst(utterances, 1)] == ["u2"]


def test_page_csv_and_table(tmp_path: Path) -> None:
    report = written(tmp_path)
    assert report.html == tmp_path / "run" / "report" / "decoding-test.html"
    page = report.html.read_text()
    assert "50.0" in report.answer[0] and "5 errors in 10 words" in report.answer[0]
    assert any("4 of 5 utterances have at least one error" in line for line in report.answer)
    assert "left \u2192 right" in page and "word-loop" in page and "<dd>dev</dd>" in page
    assert page.index("b-2") < page.index("b-3") < page.index("a-1")
    assert "b-1" not in page  # it has no error
    assert "***" in page and 'class="pair insertion" title="insertion"' in page
    assert "2\u00a0errors in 1\u00a0word</small>" in page
    assert "spoken recognised spoken substituted deleted *** *** inserted" in words_of(report.html)
    assert "not audio" in page and "<audio" not in page
    with report.csv.open(newline="", encoding="utf-8") as file:
        rows = {row["utterance"]: row for row in csv.DictReader(file)}
    assert len(rows) == 5 and rows["b-2"]["hypothesis"] == "right right" and rows["b-2"]["speaker"] == "bob"
    counts = ("words", "substitutions", "deletions", "insertions")
    assert [rows["b-2"][name] for name in counts] == ["1", "1", "0", "1"]
    output = io.StringIO()
    Console(file=output, width=200).print(report.table)
    shown = output.getvalue()
    assert "Word errors by speaker" in shown and shown.index("bob") < shown.index("ann")
    assert not any("other speakers" in line for line in report.answer)


def test_one_of_a_kind_is_written_in_the_singular(tmp_path: Path) -> None:
    answer = written(tmp_path, (Heard("a-1", "ann", "go", "stop"),)).answer
    assert (
        answer[0].endswith(": 1 error in 1 word.") and "1 substitution, 0 deletions, 0 insertions." in answer
    )


def test_speakers_that_a_terminal_leaves_out_are_counted(tmp_path: Path) -> None:
    def below(speakers: int) -> str:
        heard = [Heard(f"{n:02}-1", f"s{n:02}", "go left", "go left") for n in range(speakers)]
        (folder := tmp_path / str(speakers)).mkdir()
        output = io.StringIO()
        Console(file=output, width=200).print(written(folder, heard).table)
        return output.getvalue()

    assert "1 more speaker with a lower rate is on the page." in below(11)
    assert "2 more speakers with a lower rate are on the page." in below(12) and "more" not in below(10)


def test_page_and_terminal_say_what_other_speakers_may_expect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heard = (*UTTERANCES, Heard("c-1", "cem", "go left", "go left"))
    run_dir = tmp_path / "run"
    result, data = decoding_of(heard, run_dir), data_of(heard, tmp_path / "data", audio=False)
    answer = write_decoding_page(result, data, run_dir).answer
    (line,) = [line for line in answer if "other speakers" in line]
    assert line.startswith("For other speakers, if they differ as these 3 do: WER ")
    assert "95 % interval" in line
    DecodeCommand(run_dir, data.path)._show(result, data)
    assert f"{line[0].lower()}{line[1:-1]}\n" in capsys.readouterr().out


def test_the_page_stands_alone_and_its_ids_are_its_own(tmp_path: Path) -> None:
    reader = PageReader(written(tmp_path, audio=True).html.read_text())
    assert len(set(reader.ids)) == len(reader.ids)
    assert all(address.startswith(("data:", "#")) for address in reader.references)


def test_audio_is_embedded_as_far_as_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = int(RATE * UTTERANCES[0].seconds) * 2
    monkeypatch.setattr(page_module, "MAX_AUDIO_BYTES", 2 * one + 1)
    page = written(tmp_path, audio=True).html.read_text()
    sources = [address for address in PageReader(page).references if address.startswith("data:audio")]
    assert len(sources) == 2 and "room for the audio of 2 of them" in page
    assert page.count('aria-label="recording of ') == 2
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(sources[0].partition(",")[2])), dtype="int16")
    assert rate == RATE and 2 * len(samples) == one
    with data_of(UTTERANCES, tmp_path / "again", audio=True).open_shard("test", 1) as shard:
        assert shard.utterance_ids[1] == "b-2"  # the worst one
        assert (shard.samples(1) == samples).all()


def test_words_and_names_are_text_never_markup(tmp_path: Path) -> None:
    word = SCRIPT.replace(" ", "_")
    heard = [
        Heard(f"id{word}", f"spk{word}", f"{word} b", f"x{word} b {word}"),
        Heard("plain\x1b[31m", "b\x1b[31m\n", "b", ""),
    ]
    report = written(tmp_path, heard, audio=True)
    page = report.html.read_text()
    assert "<script>alert" not in page and "<!--&" not in page
    assert page.count("&lt;script&gt;alert") >= 8
    output = io.StringIO()
    Console(file=output, width=300, markup=False).print(report.table)
    assert "[bold_red]" in output.getvalue() and "\x1b" not in output.getvalue()


def test_where_nothing_is_wrong_or_speakers_are_unknown_their_parts_are_missing(tmp_path: Path) -> None:
    report = written(tmp_path, [Heard("a", "ann", "go", "go"), Heard("b", "ann", "left", "left")])
    page = report.html.read_text()
    assert "What was recognised wrongly" not in page and "most errors" not in page
    output = io.StringIO()
    Console(file=output).print(report.table)
    assert "by speaker" not in output.getvalue()  # one is all


def test_unknown_words_are_a_caution(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = decoding_of(UTTERANCES, run, unknown_words=2)
    report = write_decoding_page(result, data_of(UTTERANCES, tmp_path / "data", audio=False), run)
    assert "2 words (20.0 %) are not in the vocabulary: counted as errors." in report.answer
    assert f"{result.unknown_remark}." in report.answer  # as the terminal has it


@pytest.mark.parametrize(
    ("number", "said"),
    [(1, "1 word (10.0 %) is not in the"), (1500, "1,500 words (15000.0 %) are not in the")],
)
def test_words_that_cannot_be_recognised_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int, said: str
) -> None:
    run_dir = tmp_path / "run"
    result = decoding_of(UTTERANCES, run_dir, unknown_words=number)
    data = data_of(UTTERANCES, tmp_path / "data", audio=False)
    DecodeCommand(run_dir, data.path)._show(result, data)
    assert f"{said} vocabulary: counted as errors\n" in capsys.readouterr().out


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = decoding_of(UTTERANCES, run)
    (run / "report").write_text("a file where the folder should be")
    with pytest.raises(RunError, match="report: cannot be written"):
        write_decoding_page(result, data_of(UTTERANCES, tmp_path / "data", audio=False), run)


def test_aligned_words_say_what_is_wrong() -> None:
    ((first, second, third),) = align_words(["a b"], ["x a c"])
    assert (first, first.error) == (AlignedWord("", "x"), "insertion")
    assert (second.error, third.error) == (None, "substitution")
