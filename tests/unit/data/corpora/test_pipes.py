"""Pipes of Kaldi's tables: how they are read, that no shell is needed, and what is refused."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from speechdp.cli.main import run as speechdp
from speechdp.data.corpora.kaldi_dir import ReadingRules, read_kaldi_dir
from speechdp.data.corpora.path_map import PathMap
from speechdp.data.corpora.pipes import Pipe, PipeRunner
from speechdp.data.kaldi.matrix import read_matrix, read_scp
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ConfigError
from tests.helpers.corpora import kaldi_folder, no_progress, write_tone
from tests.helpers.kaldi_files import some_features, write_feats


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        ("sph2pipe -f wav a.sph |", [["sph2pipe", "-f", "wav", "a.sph"]]),
        ("cat a | sox -t wav - - |", [["cat", "a"], ["sox", "-t", "wav", "-", "-"]]),
        ("cat 'a b' \"c \\\"d\\\"\" e\\ f '' |", [["cat", "a b", 'c "d"', "e f", ""]]),
        ("grep '|' \"|x\" a\\|b |", [["grep", "|", "|x", "a|b"]]),
        ("echo '$HOME' '*' \"\\$x\" |", [["echo", "$HOME", "*", "$x"]]),
    ],
)
def test_words_are_split_as_a_shell_splits_them(text: str, commands: list[list[str]]) -> None:
    assert [list(command) for command in Pipe.parse(text, "wav.scp:1").commands] == commands


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("cat < a.wav |", "'<' needs a shell"),
        ("cat a 2> b |", "'>' needs a shell"),
        ("cat $HOME/a |", r"'\$' needs a shell"),
        ('cat "$HOME" |', r"'\$' needs a shell"),
        ("cat a; rm -r b |", "';' needs a shell"),
        ("cat `x` |", "'`' needs a shell"),
        ("cat a && cat b |", "'&' needs a shell"),
        ("cat *.wav |", r"'\*' needs a shell"),
        ("cat 'a |", "has no closing quotation mark"),
        ("|", "a pipe without a program"),
        ("cat a | | sox |", "a pipe without a program"),
    ],
)
def test_what_needs_a_shell_is_refused_by_line(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^wav.scp:7: .*{reason}") as caught:
        Pipe.parse(text, "wav.scp:7")
    assert "\n" not in str(caught.value)


def test_programs_read_what_the_one_before_writes(tmp_path: Path) -> None:
    upper = f"{sys.executable} -c 'import sys; sys.stdout.write(sys.stdin.read().upper())'"
    Pipe.parse(f"printf abc | {upper} | cat |", "x:1").run(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"ABC"
    # One that is not read to its end is no fault.
    Pipe.parse("yes | head -c 10 |", "x:1").run(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"y\n" * 5


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no-such-program a |", "no-such-program cannot be run .No such file or directory."),
        ("false |", "false ended with exit code 1; run"),
        ("false | cat |", "false ended with exit code 1"),
        ("cat /no/such/file |", "cat ended with exit code 1 .cat: /no/such/file: .*; run the line by hand"),
        ("true |", "true wrote nothing"),
        ("cat a | no-such-program |", "no-such-program cannot be run"),
    ],
)
def test_programs_that_fail_are_named(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^wav.scp:3: {reason}") as caught:
        Pipe.parse(text, "wav.scp:3").run(tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_a_pipe_that_fails_ends_the_others(tmp_path: Path) -> None:
    pipes = {text: Pipe.parse(text, "wav.scp:3") for text in ("sleep infinity | cat |", "false |")}
    with pytest.raises(ConfigError, match="false ended with exit code 1"):
        PipeRunner(tmp_path, 2, no_progress).run(pipes)  # else it waits for ever


def piped(source: Path) -> Path:
    """Let the entries of wav.scp be written by programs."""
    lines = [line.split() for line in (source / "wav.scp").read_text().splitlines()]
    (source / "wav.scp").write_text("".join(f"{u} cat {source / file} | cat |\n" for u, file in lines))
    return source


def test_pipes_run_only_where_they_may(tmp_path: Path) -> None:
    source = piped(kaldi_folder(tmp_path / "kaldi"))
    with pytest.raises(ConfigError) as caught:
        read_kaldi_dir(source)
    assert str(caught.value) == (
        f"{source / 'wav.scp'}:1: a pipe (utt0) runs cat (3 pipes in all); let the programs run with "
        "--allow-pipes, or write their output to files"
    )


def test_one_pipe_is_counted_as_one(tmp_path: Path) -> None:
    source = piped(kaldi_folder(tmp_path / "kaldi", 1))
    with pytest.raises(ConfigError, match=re.escape("a pipe (utt0) runs cat (1 pipe in all); ")):
        read_kaldi_dir(source)


def test_the_output_of_pipes_is_prepared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = kaldi_folder(tmp_path / "plain", 4)
    source = piped(Path(shutil.copytree(plain, tmp_path / "kaldi")))
    split = ["--split", "random:dev=0", "--shards", "1"]
    assert speechdp(["prepare", str(plain), str(tmp_path / "a"), *split]) == 0
    capsys.readouterr()
    assert speechdp(["prepare", str(source), str(tmp_path / "b"), *split, "--allow-pipes"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "ran the programs of pipes, without a shell: cat (8 times)" in printed
    assert (tmp_path / "a" / "train-00000.h5").read_bytes() == (
        tmp_path / "b" / "train-00000.h5"
    ).read_bytes()
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [
        "classes.txt", "data.json", "files.json", "lexicon.txt", "train-00000.h5",
    ]  # fmt: skip


def test_what_a_pipe_wrote_is_named_by_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = kaldi_folder(tmp_path / "kaldi")
    lines = (source / "wav.scp").read_text().splitlines()
    (source / "wav.scp").write_text("\n".join([*lines[:2], "utt2 printf RIFFnothing |"]) + "\n")
    assert (
        speechdp(["prepare", str(source), str(tmp_path / "data"), "--allow-pipes", "--split", "random:dev=0"])
        == 1
    )
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{source / 'wav.scp'}:3: what the pipe of utt2 wrote: unreadable audio" in error
    assert not (tmp_path / "data").exists()


def test_paths_in_pipes_are_mapped(tmp_path: Path) -> None:
    audio = write_tone(tmp_path / "audio" / "a.wav")
    runner = PipeRunner(tmp_path, 1, no_progress)
    rules = ReadingRules(path_map=PathMap([("/export/corpus", str(audio.parent))]), pipes=runner)
    files = rules.run_pipes({"a": "cat /export/corpus/a.wav |"}, tmp_path / "wav.scp", {"a": 1})
    assert files["a"].read_bytes() == audio.read_bytes()


def test_features_may_come_from_pipes(tmp_path: Path) -> None:
    features = some_features((5,))
    write_feats(tmp_path, features)
    ark = tmp_path / "feats.ark"
    start = int((tmp_path / "feats.scp").read_text().rpartition(":")[2])
    (tmp_path / "feats.scp").write_text(f"utt0 tail -c +{start + 1} {ark} |\n")
    rules = ReadingRules(pipes=PipeRunner(tmp_path, None, no_progress))
    table = read_scp(tmp_path / "feats.scp", rules)
    assert read_matrix(table["utt0"], "utt0").tolist() == features["utt0"].tolist()
    assert rules.pipes is not None and rules.pipes.notices == (
        "ran the programs of pipes, without a shell: tail (1 times)",
    )
    with pytest.raises(ConfigError, match=r"feats\.scp:1: a pipe \(utt0\) runs tail"):
        read_scp(tmp_path / "feats.scp")


def test_segments_of_a_recording_that_a_pipe_writes(tmp_path: Path) -> None:
    source = kaldi_folder(tmp_path / "kaldi", 2)
    write_tone(source / "wav" / "rec.wav", 2.0)
    (source / "wav.scp").write_text(f"rec cat {source / 'wav' / 'rec.wav'} |\n")
    (source / "segments").write_text("utt0 rec 0 1\nutt1 rec 1 2.2\n")
    data = tmp_path / "data"
    arguments = ["prepare", str(source), str(data), "--allow-pipes", "--split", "random:dev=0"]
    assert speechdp(arguments) == 0
    assert Dataset.open(data).num_frames("train") == 200
