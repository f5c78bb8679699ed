"""The page of a profile: its pictures, tables and CSV."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from speechdp.cli.report import ReportCommand
from speechdp.errors import ConfigError, RunError
from speechdp.experiments.profile.derived import (
    STEP,
    all_scalings,
    main_job,
    make_scaling,
)
from speechdp.experiments.profile.record import WEAK, read_profile, read_record, write_record
from speechdp.experiments.record import FAILED, PENDING
from speechdp.report.kit.pages import WrittenReport
from speechdp.report.profile import gantt as gantts
from speechdp.report.profile.answer import find_answer
from speechdp.report.profile.figures import make_pictures
from speechdp.report.profile.page import profile_page, write_profile_page
from speechdp.report.profile.table import make_tables
from tests.helpers.page_reader import PageReader
from tests.helpers.profile_checks import answer_of, job_of_one_step, recorded_seconds, small_profile
from tests.helpers.profiles import MadeUpProfile, write_profile
from tests.helpers.terminal import on_terminal

HOSTILE = "<img src=x onerror=alert(1)>&\"'"
PICTURES = ("utilisation", "first_steps", "functions", "single", "memory", "gantt")


@pytest.fixture(scope="module")
def realistic(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WrittenReport]:
    made_up = MadeUpProfile(steps=14, growth={"decoder": 0.25, "postproc": 0.06})
    out = write_profile(tmp_path_factory.mktemp("profile") / "out", made_up)
    return out, write_profile_page(out)


def _page(out: Path) -> str:
    """Return the page alone: pictures to pass on take their time."""
    profile = read_profile(out)
    scalings = all_scalings(profile)
    tables = make_tables(profile, scalings, main_job(profile))
    return profile_page(profile, find_answer(profile, scalings), make_pictures(profile), tables)


def test_the_gantt_shows_usual_steps_and_tells_waiting_apart(realistic: tuple[Path, WrittenReport]) -> None:
    job = main_job(read_profile(realistic[0]))
    assert job is not None and job.name == "weak-4"
    gantt = gantts.make_gantt(job, 3)
    assert gantt is not None and len(gantt.lanes) == 4
    assert gantt.steps[0] > 3 and gantt.steps[1] - gantt.steps[0] == 2
    shown = [bar for lane in gantt.lanes for bar in lane]
    assert min(bar.start_ms for bar in shown) == 0
    assert max(bar.start_ms + bar.duration_ms for bar in shown) == pytest.approx(gantt.width_ms)
    assert {bar.phase for bar in shown if bar.function == "decoder"} == {"forward", "backward"}
    waits = [bar for bar in shown if bar.waiting]
    assert waits and all(bar.function == "exchange" and "waiting" in bar.text for bar in waits)
    decoder = next(b for b in gantt.lanes[2] if (b.function, b.phase) == ("decoder", "backward"))
    assert decoder.text == f"rank 2, step {decoder.step}: decoder backward, {decoder.duration_ms:.0f} ms"
    svg = gantts.svg_of_gantt(gantt)
    assert svg.count('<g class="bar"') == len([bar for bar in shown if bar.function])
    assert svg.count("<title>") == len(shown)


def test_many_ranks_are_cut_and_said(tmp_path: Path) -> None:
    job = job_of_one_step(*[[(0.0, 1.0)]] * (gantts.MAX_RANKS + 3), name="decoder")
    gantt = gantts.make_gantt(job, 0)
    assert gantt is not None and len(gantt.lanes) == gantts.MAX_RANKS and gantt.hidden_ranks == 3


@pytest.mark.parametrize(("width", "distance"), [(1800, 200), (9, 1), (0.04, 0.005), (1000, 200)])
def test_ticks_are_round_numbers(width: float, distance: float) -> None:
    assert gantts.tick_distance(width, 9) == pytest.approx(distance)


def test_feeders_are_a_third_kind_of_trainloader(tmp_path: Path) -> None:
    out = small_profile(tmp_path)
    record = read_record(out)
    write_record(out, record.with_job(1, kind="fed", name="fed-2"))
    text = " ".join(answer_of(out).details)
    assert "With feeder ranks waiting takes 0.7 %" in text and " frames/s." in text
    assert "trainloader on feeder ranks (fed-2)" in _page(out)


def test_failed_and_pending_jobs_are_named(tmp_path: Path) -> None:
    out = small_profile(tmp_path)
    record = read_record(out)
    record = record.with_job(1, state=FAILED, message=f"rank 1: {HOSTILE}").with_job(3, state=PENDING)
    write_record(out, record)
    cautions, page = answer_of(out).cautions, _page(out)
    assert f"weak-2 failed: rank 1: {HOSTILE}" in cautions
    assert "Not run yet: strong-2." in cautions
    assert "img" not in PageReader(page).tags and "pending" in page


def test_a_profile_without_a_finished_job_still_has_a_page(tmp_path: Path) -> None:
    out = small_profile(tmp_path)
    record = read_record(out)
    for index in range(len(record.jobs)):
        record = record.with_job(index, state=FAILED, message="no memory")
    write_record(out, record)
    report = write_profile_page(out)
    assert report.png is None and "no results yet" in report.answer[0]
    assert "no memory" in report.html.read_text()


def test_one_module_alone_makes_a_page_of_its_own(tmp_path: Path) -> None:
    out = small_profile(tmp_path)
    record = read_record(out)
    write_record(out, replace(record, jobs=tuple(job for job in record.jobs if job.kind == "encoder")))
    assert answer_of(out).headline == "Alone, the encoder keeps an efficiency of 100 % on 2 ranks."
    assert [p.name for p in make_pictures(read_profile(out))] == ["first_steps", "single", "memory", "gantt"]
    assert 'id="table-times-single"' in _page(out)


def test_an_acoustic_model_has_other_functions(tmp_path: Path) -> None:
    functions = {"trainloader": (0.001,), "encoder": (0.03, 0.06), "output": (0.01, 0.02), "update": (0.001,)}
    out = small_profile(tmp_path, functions=functions, growth={"output": 0.5}, ranks=(2, 4))
    headline = answer_of(out).headline
    assert headline.startswith("Output loses most: on 4 ranks it takes 30.7 ms")
    assert "more than on 2 (76.1 instead of 45.5 ms)" in headline
    assert "postproc" not in _page(out).split("<script>")[0]


def test_the_csv_holds_what_is_plotted(realistic: tuple[Path, WrittenReport]) -> None:
    out, report = realistic
    rows = list(csv.DictReader(io.StringIO(report.csv.read_text())))
    weak = make_scaling(read_profile(out), WEAK)
    assert weak is not None

    def value(**wanted: str) -> float:
        found = [r for r in rows if all(r[key] == text for key, text in wanted.items())]
        assert len(found) == 1, wanted
        return float(found[0]["value"])

    for function in ("encoder", "decoder", STEP):
        for ranks in (1, 2, 4):
            named = {"job": f"weak-{ranks}", "function": function}
            cost = weak.costs[function][ranks]
            assert value(**named, quantity="time_a_step", phase="forward") == cost.forward_s
            assert value(**named, quantity="time_a_step", phase="all") == cost.total_s
            assert value(**named, quantity="efficiency") == weak.efficiency(function, ranks)
    span = value(job="weak-4", rank="3", step="5", function="postproc", phase="backward", quantity="duration")
    assert span == recorded_seconds(out, "weak-4", 3, "postproc", "backward")[1]
    assert value(job="weak-4", quantity="memory_balance") == pytest.approx(409 / 400)
    assert value(job="weak-4", rank="3", quantity="peak_rss") == 409 << 20
    assert value(job="blocking-4", quantity="wait_share") > 0.1
    samples = [r for r in rows if r["job"] == "blocking-4" and r["quantity"] == "cpu_utilisation"]
    assert len(samples) == 40 * 4 and float(samples[0]["value"]) == 8.0


def test_all_files_are_written(realistic: tuple[Path, WrittenReport]) -> None:
    out, report = realistic
    assert report.html == out / "report" / "profile.html" and report.csv == out / "report" / "profile.csv"
    assert report.png == out / "report" / "functions.png"
    for name in PICTURES:
        png = (out / "report" / f"{name}.png").read_bytes()
        assert png.startswith(b"\x89PNG") and len(png) > 10_000, name
    assert json.loads((out / "report" / "trace.json").read_text())["otherData"]["job"] == "weak-4"


def test_captions_name_the_posters_figures(realistic: tuple[Path, WrittenReport]) -> None:
    captions = {picture.name: picture.caption for picture in make_pictures(read_profile(realistic[0]))}
    assert tuple(captions) == PICTURES
    figures = {"utilisation": 2, "first_steps": 3, "functions": 4, "single": 5}
    page = realistic[1].html.read_text()
    for name, number in figures.items():
        assert f"figure {number} of the IBM/NTU poster (docs/profile.md)" in captions[name]
        assert captions[name] in page
    assert "gaps" not in captions["utilisation"]  # what is not computing need not be waiting


def test_the_page_reaches_nothing_outside(realistic: tuple[Path, WrittenReport]) -> None:
    text = realistic[1].html.read_text()
    page = PageReader(text)
    assert page.tags.count("script") == 1
    assert all(reference.startswith(("#", "data:,")) for reference in page.references)
    assert len(page.ids) == len(set(page.ids))
    assert {"plot-gantt", "plot-functions-weak", "plot-functions-strong", "plot-functions-single"} <= set(
        page.ids
    )
    assert {"table-times-weak", "table-memory", "table-first-steps", "table-loaders"} <= set(page.ids)
    assert "nan" not in text.split("<script>")[0].lower().replace("dominant", "")


def test_foreign_names_stay_text(tmp_path: Path) -> None:
    functions = {"encoder": (0.03, 0.06), HOSTILE: (0.02, 0.02)}
    made_up = MadeUpProfile(ranks=(1, 2), steps=4, functions=functions, growth={HOSTILE: 1.0})
    changes = {"preset": HOSTILE, "notes": (HOSTILE,), "command": ("speechdp", HOSTILE)}
    out = write_profile(tmp_path / "<b>out</b>", made_up, **changes)
    record = read_record(out)
    for index, job in enumerate(record.jobs):
        record = record.with_job(index, name=f'{job.name}"><b>{HOSTILE}')
    write_record(out, record)
    for path in out.glob("*/samples-*.jsonl"):
        path.write_text(path.read_text().replace("node-a", "<b>node</b>"))
    text = _page(out)
    page = PageReader(text)
    assert not {"img", "b"} & set(page.tags)
    assert page.tags.count("script") == 1
    assert "&lt;img src=x onerror=alert(1)&gt;" in text
    assert HOSTILE.capitalize() in answer_of(out).headline


def test_the_terminal_shows_the_tables(realistic: tuple[Path, WrittenReport]) -> None:
    text = on_terminal(realistic[1].table, 180)
    line = next(line for line in text.splitlines() if line.strip().startswith("decoder"))
    assert "91.8 + 173 = 265" in line and " 57 " in line
    for title in ("Weak scaling", "Strong scaling", "A module alone", "First steps", "Memory of weak-4"):
        assert title in text


def test_the_command_report_recognises_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = small_profile(tmp_path)
    record = read_record(out)
    write_record(out, replace(record, jobs=record.jobs[:1]))
    with pytest.raises(ConfigError, match="is a profile"):
        ReportCommand(out, target=-0.5).run()
    assert ReportCommand(out).run() == 0
    printed = capsys.readouterr().out
    assert str(out / "report" / "profile.html") in printed
    assert "Only 1 rank was profiled" in printed and "Weak scaling" in printed


def test_errors_are_the_users_to_mend(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="profile"):
        write_profile_page(tmp_path)
    out = small_profile(tmp_path)
    (out / "report").write_text("in the way")
    with pytest.raises(RunError, match=r"report: cannot be written \(File exists\); remove the file"):
        write_profile_page(out)
