"""What is missing or wrong on a command line is told in a line, which names what could stand there."""

from __future__ import annotations

import pytest

from speechdp.cli import main
from speechdp.cli.support.refusals import line_of
from tests.helpers.jobs import DEADLINE_S, ended_within, our_lines, under_mpirun


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("train", "train needs DATA and RUN; speechdp train --help says what that is"),
        ("train DATA", "train needs RUN; speechdp train --help says what that is"),
        ("shard DATA OUT", "shard needs --shards N; speechdp shard --help says what that is"),
        ("posteriors RUN DATA", "posteriors needs --out FILE; speechdp posteriors --help says what that is"),
        ("train DATA RUN more", "train does not take more; speechdp train --help says what it takes"),
        (
            "train DATA RUN --optimizer sdg",
            "--optimizer sdg: choose one of adam, adamw, sgd; did you mean sgd?",
        ),
        ("train DATA RUN --device tpu", "--device tpu: choose one of auto, cpu, cuda; did you mean cpu?"),
        ("train DATA RUN --precision zzz", "--precision zzz: choose one of bf16, fp16, fp32"),
        ("train DATA RUN --epochs", "--epochs needs a value"),
        ("train DATA RUN --resume=yes", "--resume takes no value; leave =yes out"),
        ("train DATA RUN --no-resume=yes", "--no-resume takes no value; leave =yes out"),
        ("train DATA RUN --epochs few", "--epochs: expected a whole number, got 'few'"),
        ("train DATA RUN --learning-rate few", "--learning-rate: expected a number, got 'few'"),
        ("launch -np few -- train DATA RUN", "--np: expected a whole number, got 'few'"),
        ("launch -np few -- train DATA RUN --help", "--np: expected a whole number, got 'few'"),
        ("launch -np 2 -- train DATA RUN --epochs few", "--epochs: expected a whole number, got 'few'"),
        ("launch -np 2 train DATA RUN --epochs 3", "launch: write -- before the command: ... -- train ..."),
        ("submit train DATA RUN", "submit: write -- before the command: ... -- train ..."),
    ],
)
@pytest.mark.parametrize("columns", ["40", "200"])
def test_a_refusal_is_one_line(
    command: str,
    says: str,
    columns: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as ended:
        main.run(command.split())
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"speechdp: {says}\n")


@pytest.mark.parametrize(
    "command",
    ["train DATA RUN --optimizer sdg --help", "train --epochs -h", "launch -np few -h -- train DATA"],
)
def test_who_asks_for_help_gets_it_beside_wrong_values(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.run(command.split())
    said = capsys.readouterr()
    assert (ended.value.code, said.err) == (0, "")
    assert said.out.startswith(f"usage: speechdp {command.split(maxsplit=1)[0]} [-h]")


def test_what_is_told_in_another_box_stays() -> None:
    lines = ("\x1b[31m╭─ Anything else ──╮\x1b[0m", "│ one               │", "│     two           │")
    more = ("│ ───────────────── │", "│ For full helptext │", "╰───────────────────╯")
    assert line_of("\n".join([*lines, *more]), "train") == "Anything else: one two"
    # Where standard output is not UTF-8.
    lines, more = (
        (" Anything else ", " ------ ", "  one", "      two"),
        ("  ------", "  For full helptext", " "),
    )
    assert line_of("\n".join([*lines, *more]), "train") == "Anything else: one two"


def test_a_refusal_of_all_ranks_is_told_once() -> None:
    ended = ended_within(DEADLINE_S, under_mpirun(2, "train", "DATA"))
    assert ended.exit_code == 2, ended.output
    assert our_lines(ended) == ["speechdp: train needs RUN; speechdp train --help says what that is"]
