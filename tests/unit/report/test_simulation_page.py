"""The page and table of a simulation, and what `speechdp simulate` refuses."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from pathlib import Path

import pytest

from speechdp.cli.main import run as speechdp
from speechdp.report.compare.report import write_comparison as write_comparison_report
from speechdp.report.runs.folders import read_run, read_sweep
from speechdp.report.simulation.report import TIME_ONLY
from speechdp.report.simulation.table import hours_text
from speechdp.simulation import fit
from speechdp.simulation import gain_sentence as sentences
from speechdp.simulation.gain_sentence import gain_sentence
from tests.helpers.comparisons import MadeUpStrategy, write_comparison
from tests.helpers.measured_runs import MadeUpSteps
from tests.helpers.page_reader import PageReader

GIVEN = ("--ranks", "4,8", "--ranks-per-node", "2", "--bandwidth", "1gbit", "--latency", "50us")


def _refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert speechdp(["simulate", *map(str, arguments)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MadeUpSteps(["node-a"] * 2).write(tmp_path_factory.mktemp("runs"))


def test_table_page_and_csv_have_every_prediction(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strategies = "gradient_averaging,model_averaging,ad_psgd:period=8,parameter_server"
    arguments = ["simulate", str(run), *GIVEN, "--strategies", strategies, "--periods", "1,16"]
    assert speechdp([*arguments, "--slow", "1:2", "--target-frames", "1e9"]) == 0
    printed = capsys.readouterr().out
    folder = run / "simulation"
    rows = list(csv.DictReader(io.StringIO((folder / "simulation.csv").read_text())))
    assert [(row["strategy"], row["period"], row["ranks"]) for row in rows] == [
        (strategy, period, ranks)
        for strategy, period in (
            ("gradient_averaging", "1"),
            ("model_averaging:period=1", "1"),
            ("model_averaging:period=16", "16"),
            ("ad_psgd:period=8", "8"),
            ("parameter_server", "1"),
        )
        for ranks in ("4", "8")
    ]
    for row in rows:
        numbers = {key: float(value) for key, value in row.items() if key != "strategy" and value}
        shares = [numbers[key] for key in ("computing", "data_wait", "exchange", "waiting")]
        assert sum(shares) == pytest.approx(1.0)
        assert numbers["frames_per_s_low"] <= numbers["frames_per_s"] <= numbers["frames_per_s_high"]
        hours = numbers["ranks"] * 1e9 / numbers["frames_per_s"] / 3600
        assert numbers["gpu_hours"] == pytest.approx(hours)
    page = (folder / "simulation.html").read_text()
    assert (folder / "simulation.png").stat().st_size > 10_000
    reader = PageReader(page)
    assert {"plot-efficiency", "plot-hours", "plot-periods", "overview", "predictions"} <= set(reader.ids)
    assert page.count('<th scope="row"') == len(rows) + 4  # and a line for each strategy in the overview
    for text in (page, printed):
        assert TIME_ONLY in " ".join(text.split())
        assert "On 8 ranks over 1 Gbit/s" in text.replace("\u00a0", " ")
    # The sentence has the table's figures: in two digits an upper end of 104,000 was called 100,000.
    said = re.search(r"would train at ([\d,]+) frames/s \[([\d,]+), ([\d,]+)\]", " ".join(printed.split()))
    assert said is not None
    numbers = [float(text.replace(",", "")) for text in said.groups()]
    (row,) = (row for row in rows if (row["strategy"], row["ranks"]) == ("gradient_averaging", "8"))
    expected = [float(row[f"frames_per_s{end}"]) for end in ("", "_low", "_high")]
    assert numbers == pytest.approx(expected, rel=0.005)
    # What is said of the shortest of the fast periods is of that period.
    rates = {row["period"]: float(row["frames_per_s"]) for row in rows
             if row["strategy"].startswith("model_averaging") and row["ranks"] == "8"}  # fmt: skip
    shortest = min(int(period) for period in rates if rates[period] >= 0.95 * max(rates.values()))
    said = re.search(r"Model averaging with period (\d+), the shortest that has 95 % of the fastest period's "
                     r"speed, would train at ([\d,]+) frames/s", " ".join(printed.split()))  # fmt: skip
    assert said is not None and int(said[1]) == shortest
    assert float(said[2].replace(",", "")) == pytest.approx(rates[said[1]], rel=0.005)
    assert "rank 1: 2 times as long" in page
    assert str(folder / "simulation.html") in printed


def test_assumptions_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = MadeUpSteps(["node-a"]).write(tmp_path)
    assert speechdp(["simulate", str(path), "--ranks", "2", "--bandwidth", "1gbit"]) == 0
    printed = capsys.readouterr().out
    assert "The latency between nodes was not measured: 50 µs are assumed" in printed
    assert "Exchanges inside a node were not measured" in printed


def test_of_a_scripts_run_what_it_counts_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = MadeUpSteps(["node-a"] * 2).write(tmp_path)
    settings = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(settings | {"script": "train.py"}))
    assert speechdp(["simulate", str(path), *GIVEN, "--strategies", "gradient_averaging"]) == 0
    page = (path / "simulation" / "simulation.html").read_text()
    page = re.sub(r"<(style|script).*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL)
    for text in (page, capsys.readouterr().out):
        assert "items/s" in text and "frames" not in text.lower()


def test_a_sweep_is_simulated_from_its_finished_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = ["node-a"] * 2
    MadeUpSteps(hosts).write(tmp_path, "gradient_averaging")
    MadeUpSteps(hosts, "model_averaging:period=1").write(tmp_path, "model_averaging-1")
    MadeUpSteps(hosts, "bmuf:period=1").write(tmp_path, "unfinished", completed=False)
    arguments = ["simulate", str(tmp_path), "--ranks", "2", "--strategies", "gradient_averaging"]
    assert speechdp(arguments) == 0
    page = (tmp_path / "simulation" / "simulation.html").read_text()
    assert "Steps were drawn from: gradient_averaging, model_averaging-1." in page
    assert len(read_sweep(tmp_path).runs) == 3  # its own folder is taken for no run


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "neither a sweep (sweep.json)" in _refusal(capsys, tmp_path)
    assert "give that of a run" in _refusal(capsys, tmp_path / "nothing")


def test_an_unfinished_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = MadeUpSteps(["node-a"] * 2).write(tmp_path, completed=False)
    assert "has not finished (no completed.json); continue it with --resume" in _refusal(capsys, path)
    assert "none of its runs has finished" in _refusal(capsys, *[_second(tmp_path)])


def _second(folder: Path) -> Path:
    MadeUpSteps(["node-a"] * 2).write(folder, "other", completed=False)
    return folder


def test_a_run_without_step_times_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = MadeUpSteps(["node-a"] * 2).write(tmp_path)
    (path / "timeline" / "rank-0001.jsonl").unlink()
    assert "rank-0001.jsonl: missing; its steps are what a simulation is made of" in _refusal(capsys, path)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--bandwidth", "fast", "is no bandwidth; write 1gbit, 100gbit or 25GB/s"),
        ("--bandwidth", "0gbit", "is no bandwidth"),
        ("--bandwidth", "25Gb/s", "is no bandwidth"),
        ("--bandwidth", "1e999gbit", "is no bandwidth"),
        ("--latency", "1e999s", "is no time"),
        ("--target-frames", "1e999", "is no number of frames"),
        ("--slow", "1:2,1:3", "rank 1 is there twice"),
        ("--latency", "5", "is no time; write 5us"),
        ("--latency", "5m", "is 300 s, longer than a message takes; write 5us, 0.1ms or 0s"),
        ("--latency", "1e308h", "is inf s, longer than a message takes"),
        ("--intra-latency", "5gbit", "--intra-latency 5gbit: is no time"),
        ("--ranks", "8,x", "'x' is no whole number from 1"),
        ("--ranks", "8,...,64", "'...' is no whole number"),
        ("--ranks", "8,12,...,64", "unclear what the dots stand for"),
        ("--ranks", "9999999", "is too many; at most 65,536"),
        ("--ranks", 20 * "9", "is too many; at most 65,536"),
        ("--ranks-per-node", "0", "at least 1"),
        ("--slow", "1", "is not RANK:FACTOR"),
        ("--slow", "1:9999999", "a factor must be above 1e-06 and below a million"),
        ("--slow", "8:2", "there is no rank 8 among 8"),
        ("--compute-speedup", "0", "must be above 1e-06 and below a million, e.g. 20"),
        ("--compute-speedup", "1e-300", "must be above 1e-06"),
        ("--periods", "0", "no whole number from 1"),
        ("--target-frames", "1e300", "is too many frames, at most 1e+18"),
        ("--target-frames", "many", "is no number of frames"),
        ("--strategies", "gossip", "gossip"),
    ],
)
def test_nonsense_is_refused(
    run: Path, option: str, value: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in _refusal(capsys, run, *GIVEN, option, value)


def test_why_nothing_is_predicted_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one_node = ("--ranks", "8", "--ranks-per-node", "8")
    refusal = _refusal(capsys, run, *one_node, "--strategies", "model_averaging:between_nodes=64")
    assert "nothing can be predicted for these --ranks and --ranks-per-node: model_averaging" in refusal
    assert "all 8 ranks are on one node" in refusal
    groups = ("--ranks", "4,7", "--ranks-per-node", "8", "--strategies", "ad_psgd:groups=2")
    assert speechdp(["simulate", str(run), *groups]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Nothing can be predicted for 7 ranks: ad_psgd:groups=2: 7 ranks cannot be divided" in said


def test_a_link_that_was_not_measured_must_be_given(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "give --bandwidth (and --latency, " in _refusal(capsys, run, "--ranks", "8")


def test_a_report_says_what_would_help_most(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "_USUAL_SPREAD", 0.0)
    steps = MadeUpSteps(["node-a"] * 2, "model_averaging:period=1", exchange_s=0.1, data_wait_s=0.02)
    assert speechdp(["report", str(steps.write(tmp_path))]) == 0
    printed = " ".join(capsys.readouterr().out.replace("\u00a0", " ").split())
    (sentence,) = [s for s in printed.split(". ") if s.startswith("What would help")]
    # A step has 100 ms of work, 20 of waiting for data and 100 of exchange.  What other exchanges take is
    # predicted, with the error of predictions.
    assert "with exchanges 10 times as fast it would be 1.69 [1.61, 1.78] times as fast; " in sentence
    assert "with period 4, 1.52 [1.44, 1.59] times; " in sentence
    assert "without waiting for data, 1.10 [1.10, 1.10] times" in sentence
    assert "differences" not in sentence  # its ranks are alike
    assert "not accuracy" in sentence


def test_a_longer_period_is_proposed_where_none_was_tried(tmp_path: Path) -> None:
    def told(name: str, *periods: int) -> str:
        for period in periods:
            steps = MadeUpSteps(["node-a"] * 2, f"model_averaging:period={period}", exchange_s=0.1)
            steps.write(tmp_path / name, f"p{period}")
        runs = [read_run(tmp_path / name / f"p{period}") for period in periods]
        return gain_sentence(runs[0], "it", runs)

    assert "with period 4, " in told("one", 1)
    assert "What would help it most" in told("two", 1, 2) and "with period" not in told("again", 1, 2)
    assert "with period 8, " in told("shorter", 2, 1)


def test_nothing_is_proposed_for_a_run_whose_period_changed(tmp_path: Path) -> None:
    """Its strategy may be unknown here, or not declare that: predictions are for a constant period."""
    run = MadeUpSteps(["node-a"] * 2, "model_averaging:period=1", exchange_s=0.1).write(tmp_path)
    periods = run / "timeline" / "periods.jsonl"
    for words, says in ((("1", "1"), True), (("1", "2"), False)):
        lines = (json.dumps({"step": 8 * k, "t": 0.0, "period": period}) for k, period in enumerate(words))
        periods.write_text("".join(f"{line}\n" for line in lines))
        assert bool(gain_sentence(read_run(run), "it")) is says


def test_of_a_long_run_the_end_tells_what_would_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = MadeUpSteps(["node-a"] * 2, "model_averaging:period=1", exchange_s=0.1).write(tmp_path)
    whole = gain_sentence(read_run(run), "it")
    file = run / "timeline" / "rank-0000.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(["no line of JSON"] * 50 + lines[50:]) + "\n")
    read = list[int]()
    keep = sentences.measured_run
    monkeypatch.setattr(sentences, "_MOST_BYTES", 2 * sum(len(line) + 1 for line in lines[-20:]))
    monkeypatch.setattr(
        sentences, "measured_run", lambda *a, **k: read.append(len((m := keep(*a, **k)).times.frames)) or m
    )
    assert "What would help it most" in gain_sentence(read_run(run), "it") and "help it most" in whole
    assert read == [16]  # less as many steps as the warm-up has, which an older run does not bound


def test_a_comparison_says_what_would_help_most(tmp_path: Path) -> None:
    strategies = [
        MadeUpStrategy("model_averaging:period=1", 9_000),
        MadeUpStrategy("gradient_averaging", 8_000),
    ]
    out = write_comparison(tmp_path / "out", strategies, (2,), modes=("frames",))
    for path in sorted(out.glob("frames-2x-model*")):
        steps = MadeUpSteps(["node-a"] * 2, "model_averaging:period=1", exchange_s=0.3)
        made = steps.write(tmp_path / "made", path.name)
        (made / "timeline").rename(path / "timeline")
    assert any("What would help" in text for text in write_comparison_report(out).answer)


def test_a_damaged_timeline_is_no_reason_to_report_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = MadeUpSteps(["node-a"] * 2, "model_averaging:period=1", exchange_s=0.1).write(tmp_path)
    file = path / "timeline" / "rank-0001.jsonl"
    lines = file.read_bytes().splitlines()
    lines[20] = b'{"step": 21, "wall": 0.1, "frames": 500, "spans": [[["comm"], 0, 1], 7]}'
    file.write_bytes(b"\n".join([*lines[:60], b"\xff\x00 half a li", *lines[61:]]))
    assert speechdp(["report", str(path)]) == 0
    assert "What would help" in capsys.readouterr().out
    file.write_bytes(b"\xff" * 100)
    assert speechdp(["report", str(path)]) == 0
    assert "What would help" not in capsys.readouterr().out
    assert "rank-0001.jsonl: damaged, no step of it can be read" in _refusal(capsys, path)


def test_the_headline_has_the_period_of_what_it_predicts(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert speechdp(["simulate", str(run), *GIVEN, "--strategies", "bmuf", "--periods", "4,16"]) == 0
    assert "bmuf with period 4 would train at" in " ".join(capsys.readouterr().out.split())


def test_nothing_would_help_a_run_that_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = MadeUpSteps(["node-a"] * 2, "model_averaging:period=1", exchange_s=1e-6)
    assert speechdp(["report", str(steps.write(tmp_path))]) == 0
    assert "What would help" not in capsys.readouterr().out


def test_few_gpu_hours_have_digits_that_count(tmp_path: Path) -> None:
    MadeUpSteps().write(tmp_path)
    assert speechdp(["simulate", str(tmp_path / "run"), "--ranks", "2", "--target-frames", "1000"]) == 0
    page = (tmp_path / "run" / "simulation" / "simulation.html").read_text(encoding="utf-8")
    text = (tmp_path / "run" / "simulation" / "simulation.csv").read_text()
    hours = {float(row["gpu_hours"]) for row in csv.DictReader(io.StringIO(text))}
    assert all(2e-5 < one < 1e-4 and f">{one:.6f}<" in page for one in hours)


def test_hours_beside_an_axis_differ() -> None:
    ticks = [0.0, 0.0005, 0.001, 0.0015, 0.002, 0.05, 0.1, 1.5, 20.0, 1200.0]
    assert [hours_text(hours) for hours in ticks] == [
        *("0", "0.00050", "0.0010", "0.0015", "0.0020", "0.050", "0.100", "1.50", "20.0", "1,200")
    ]


@pytest.mark.parametrize("frames", ["1000", "1600", "2500", "4000", "6300"])
def test_ticks_of_hours_are_as_far_apart_as_they_say(run: Path, frames: str) -> None:
    """Not 0.0010, 0.0013, 0.0015."""
    assert speechdp(["simulate", str(run), *GIVEN, "--periods", "1", "--target-frames", frames]) == 0
    page = (run / "simulation" / "simulation.html").read_text(encoding="utf-8")
    plot = page[page.index('id="plot-hours"') :].split("</figure>")[0]
    ticks = sorted(float(text) for text in re.findall(r">([0-9.]+)</text>", plot) if float(text) < 2)
    steps = [b - a for a, b in itertools.pairwise(ticks)]
    assert len(steps) > 1 and steps == pytest.approx([steps[0]] * len(steps), rel=1e-6)


def test_one_number_of_ranks_has_bars_instead_of_lone_dots(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--ranks", "4", "--ranks-per-node", "2", "--bandwidth", "1gbit", "--latency", "50us"]
    assert speechdp(["simulate", str(run), *given, "--periods", "1,16"]) == 0
    page = (run / "simulation" / "simulation.html").read_text()
    names = {name for name in PageReader(page).ids if name.startswith("plot-")}
    assert "plot-speeds" in names and not names & {"plot-efficiency", "plot-hours", "plot-periods"}
    assert "model averaging, period 16" in page and "third plot" not in page
    # These ranks are no GPUs.
    assert "rank-hours" in page and "GPU-hours" not in page + capsys.readouterr().out
