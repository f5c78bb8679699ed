"""The page of a profile: its figures, sentences, pictures and CSV."""

from __future__ import annotations

import csv
import io
import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from speechdp.cli.report import ReportCommand
from speechdp.errors import ConfigError, RunError
from speechdp.profile import gantt as gantts
from speechdp.profile.answer import ProfileAnswer, find_answer
from speechdp.profile.derived import (
    STEP,
    Scaling,
    all_scalings,
    job_costs,
    main_job,
    make_loading,
    make_scaling,
    waiting_s,
)
from speechdp.profile.figures import make_pictures
from speechdp.profile.page import render_page, write_profile_page
from speechdp.profile.record import (
    FAILED,
    PENDING,
    STRONG,
    WEAK,
    FunctionTime,
    JobEntry,
    Memory,
    Profile,
    ProfileJob,
    RankMemory,
    RankRecord,
    StepRecord,
    read_profile,
    read_record,
    write_record,
)
from speechdp.profile.table import make_tables
from speechdp.timing.pages import WrittenReport
from tests.helpers.page_reader import PageReader
from tests.helpers.profiles import MadeUpProfile, write_profile

HOSTILE = "<img src=x onerror=alert(1)>&\"'"
PICTURES = ("utilisation", "first_steps", "functions", "single", "memory", "gantt")


@pytest.fixture(scope="module")
def realistic(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WrittenReport]:
    made_up = MadeUpProfile(steps=14, growth={"decoder": 0.25, "postproc": 0.06})
    out = write_profile(tmp_path_factory.mktemp("profile") / "out", made_up)
    return out, write_profile_page(out)


def _answer(out: Path) -> ProfileAnswer:
    profile = read_profile(out)
    return find_answer(profile, all_scalings(profile))


def _page(out: Path) -> str:
    """Return the page alone: pictures to pass on take their time."""
    profile = read_profile(out)
    scalings = all_scalings(profile)
    tables = make_tables(profile, scalings, main_job(profile))
    return render_page(profile, find_answer(profile, scalings), make_pictures(profile), tables)


def _small(tmp_path: Path, **changes: object) -> Path:
    made_up = replace(MadeUpProfile(ranks=(1, 2), steps=5, samples=False), **changes)  # type: ignore[arg-type]
    return write_profile(tmp_path / "out", made_up)


def _seconds(out: Path, job: str, rank: int, name: str, phase: str) -> list[float]:
    """Read a function's times after the warm-up from the file itself."""
    lines = (out / job / f"rank-{rank:04d}.jsonl").read_text().splitlines()[1:]
    steps = [json.loads(line) for line in lines][3:]
    return [sum(f[3] for f in step["functions"] if f[:2] == [name, phase]) for step in steps]


def test_costs_are_medians_over_steps_of_means_over_ranks(realistic: tuple[Path, WrittenReport]) -> None:
    out, _ = realistic
    cost = job_costs(next(job for job in read_profile(out).jobs if job.name == "weak-2"), 3)["decoder"]
    for phase, value in (("forward", cost.forward_s), ("backward", cost.backward_s)):
        ranks = [_seconds(out, "weak-2", rank, "decoder", phase) for rank in (0, 1)]
        means = [statistics.fmean(pair) for pair in zip(*ranks, strict=True)]
        assert value == pytest.approx(statistics.median(means))
    assert cost.whole_s == 0 and cost.total_s == cost.forward_s + cost.backward_s
    assert 0.4 < cost.share < 0.6


def test_efficiency_is_t1_over_tn_or_over_n_tn(realistic: tuple[Path, WrittenReport]) -> None:
    profile = read_profile(realistic[0])
    weak, strong = make_scaling(profile, WEAK), make_scaling(profile, STRONG)
    assert weak is not None and strong is not None
    times = {n: weak.costs["decoder"][n].total_s for n in (1, 2, 4)}
    assert times[4] / times[1] == pytest.approx(1.75, rel=0.02)
    assert weak.efficiency("decoder", 4) == pytest.approx(times[1] / times[4])
    assert weak.efficiency("decoder", 1) == 1
    # A rank's time falls with its batch, so that a function that scales keeps its efficiency.
    assert strong.costs["encoder"][4].total_s == pytest.approx(weak.costs["encoder"][4].total_s / 4, rel=1e-3)
    assert strong.efficiency("encoder", 4) == pytest.approx(1, abs=0.02)
    assert strong.efficiency("decoder", 4) == pytest.approx(1 / 1.75, rel=0.02)
    # Waiting is no work that could scale.
    assert weak.efficiency("exchange", 4) is None and weak.efficiency("trainloader", 4) is None


def _job(*ranks: list[tuple[float, float]], name: str = "exchange") -> ProfileJob:
    """Return a job of one step whose ranks have these spans, (start, duration) in s."""
    records = tuple(
        RankRecord(rank, "node", 1, 0.0, (
            StepRecord(1, 0.0, 10.0, 100, tuple(FunctionTime(name, "", *span) for span in spans)),
        ))
        for rank, spans in enumerate(ranks)
    )  # fmt: skip
    return ProfileJob(JobEntry("weak-2", WEAK, len(ranks), 8, "pooled", "weak-2"), Path("out"), records)


def test_waiting_ends_when_the_last_rank_comes() -> None:
    job = _job([(1.0, 4.0), (6.0, 1.0)], [(3.0, 2.0), (5.0, 2.0)])
    assert waiting_s(job) == {(0, 1, 0): 2.0, (1, 1, 0): 0.0, (0, 1, 1): 0.0, (1, 1, 1): 1.0}
    # A rank that leaves before the other comes waited for nobody longer than it was there.
    assert waiting_s(_job([(1.0, 0.5)], [(3.0, 2.0)])) == {(0, 1, 0): 0.5, (1, 1, 0): 0.0}
    assert waiting_s(_job([(1.0, 4.0)], [(3.0, 2.0)], name="decoder")) == {}


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
    job = _job(*[[(0.0, 1.0)]] * (gantts.MAX_RANKS + 3), name="decoder")
    gantt = gantts.make_gantt(job, 0)
    assert gantt is not None and len(gantt.lanes) == gantts.MAX_RANKS and gantt.hidden_ranks == 3


@pytest.mark.parametrize(("width", "distance"), [(1800, 200), (9, 1), (0.04, 0.005), (1000, 200)])
def test_ticks_are_round_numbers(width: float, distance: float) -> None:
    assert gantts.tick_distance(width, 9) == pytest.approx(distance)


def test_sentences_say_what_scales_and_what_does_not(realistic: tuple[Path, WrittenReport]) -> None:
    headline, *details = realistic[1].answer
    assert headline.startswith("Decoder scales worst: on 4 ranks it takes 1.7")
    assert "an efficiency of 57 %, and has 60 % of the step." in headline
    text = " ".join(details)
    assert "These scale: encoder 100 %, postproc 85 %." in text
    assert "With all ranks' batch constant the step keeps" in text and "worst decoder with 57 %" in text
    assert "decoder 100 % (in the whole step 57 %)" in text
    assert "Memory is balanced over 4 ranks: the largest peak is 1.02 times the smallest" in text
    assert "The first step takes 6.0 times as long as the usual one" in text
    assert "the first 3 steps are left out" in text
    assert "A blocking trainloader takes " in text and "one that works beside training" in text
    assert "More ranks than cores: 4 ranks share 2 cores, so from 4 ranks on" in text
    assert not any(word in text for word in ("nan", "None", "inf "))


def test_everything_scales_is_said_too(tmp_path: Path) -> None:
    answer = _answer(_small(tmp_path, growth={}))
    assert answer.headline.startswith("Every function scales to 2 ranks: the worst,")


def test_blocking_is_compared_by_means(realistic: tuple[Path, WrittenReport]) -> None:
    profile = read_profile(realistic[0])
    (blocking,), (pooled,) = profile.of_kind("blocking"), profile.of_kind("pooled")
    loading = make_loading(blocking, 3)
    waits = [_seconds(realistic[0], "blocking-4", rank, "trainloader", "") for rank in range(4)]
    assert statistics.median(waits[0]) == 0  # what a median would make of it
    assert loading.wait_s == pytest.approx(statistics.fmean(x for of_rank in waits for x in of_rank))
    assert loading.share > 10 * make_loading(pooled, 3).share
    assert loading.frames_per_s < make_loading(pooled, 3).frames_per_s


def test_unbalanced_memory_is_called_so(tmp_path: Path) -> None:
    profile = read_profile(_small(tmp_path))
    ranks = (RankMemory(0, 900 << 20, 0, 0, 0), RankMemory(1, 400 << 20, 0, 0, 0))
    jobs = tuple(replace(job, memory=Memory("gpu", ranks)) for job in profile.jobs)
    unbalanced = replace(profile, jobs=jobs)
    text = " ".join(find_answer(unbalanced, all_scalings(unbalanced)).sentences)
    assert "Memory is not balanced over 2 ranks: the largest peak is 2.25 times the smallest" in text
    assert "GPU memory" in text and "More ranks than cores" not in text


def test_cautions_are_said_only_where_they_are_due(tmp_path: Path) -> None:
    few = " ".join(_answer(_small(tmp_path, cores=1)).cautions)
    assert "Figures rest on 2 steps after the warm-up" in few and "--steps, 13 at least" in few
    assert "More ranks than cores: 2 ranks share 1 core," in few
    calm = replace(MadeUpProfile(ranks=(1, 2), steps=14, samples=False), cores=4)
    assert _answer(write_profile(tmp_path / "calm", calm)).cautions == ()


def test_times_that_vary_and_batches_that_differ_are_cautioned(tmp_path: Path) -> None:
    calm = MadeUpProfile(ranks=(1, 2), steps=14, samples=False, cores=4)
    out = write_profile(tmp_path / "out", calm)
    for rank in (0, 1):
        path = out / "weak-2" / f"rank-{rank:04d}.jsonl"
        head, *lines = path.read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        for step in steps:
            step["frames"] *= 2
            for function in step["functions"]:
                function[3] *= 1 + (step["step"] % 2 if function[0] == "decoder" else 0)
        path.write_text("\n".join([head, *map(json.dumps, steps)]) + "\n")
    text = " ".join(_answer(out).cautions)
    assert "Times of weak-2 vary from step to step" in text and "decoder 99 %" in text
    assert "encoder" not in text
    assert (
        "Batches of the weak jobs are not alike: frames of a rank in a step are 1,280 on 1, 2,560 on 2"
        in text
    )


def test_failed_and_pending_jobs_are_named(tmp_path: Path) -> None:
    out = _small(tmp_path)
    record = read_record(out)
    record = record.with_job(1, state=FAILED, message=f"rank 1: {HOSTILE}").with_job(3, state=PENDING)
    write_record(out, record)
    cautions, page = _answer(out).cautions, _page(out)
    assert f"weak-2 failed: rank 1: {HOSTILE}" in cautions
    assert "Not run yet: strong-2." in cautions
    assert "img" not in PageReader(page).tags and "pending" in page


def test_a_profile_without_a_finished_job_still_has_a_page(tmp_path: Path) -> None:
    out = _small(tmp_path)
    record = read_record(out)
    for index in range(len(record.jobs)):
        record = record.with_job(index, state=FAILED, message="no memory")
    write_record(out, record)
    report = write_profile_page(out)
    assert report.png is None and "nothing to say yet" in report.answer[0]
    assert "no memory" in report.html.read_text()


def test_one_module_alone_makes_a_page_of_its_own(tmp_path: Path) -> None:
    out = _small(tmp_path)
    record = read_record(out)
    write_record(out, replace(record, jobs=tuple(job for job in record.jobs if job.kind == "encoder")))
    assert _answer(out).headline == "Alone, the encoder keeps an efficiency of 100 % on 2 ranks."
    assert [p.name for p in make_pictures(read_profile(out))] == ["first_steps", "single", "memory", "gantt"]
    assert 'id="table-times-single"' in _page(out)


def test_an_acoustic_model_has_other_functions(tmp_path: Path) -> None:
    functions = {"trainloader": (0.001,), "encoder": (0.03, 0.06), "output": (0.01, 0.02), "update": (0.001,)}
    out = _small(tmp_path, functions=functions, growth={"output": 0.5}, ranks=(2, 4))
    headline = _answer(out).headline
    assert headline.startswith("Output scales worst: on 4 ranks it takes 1.6")
    assert "times as long as on 2," in headline
    assert "postproc" not in _page(out).split("<script>")[0]


def test_one_number_of_ranks_says_nothing_about_scaling(tmp_path: Path) -> None:
    answer = _answer(_small(tmp_path, ranks=(1,)))
    assert answer.headline == (
        "Only 1 rank was profiled, so nothing can be said about scaling; "
        "decoder takes most of the step, 51 %."
    )


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
    assert span == _seconds(out, "weak-4", 3, "postproc", "backward")[1]
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
        assert f"figure {number} of the poster" in captions[name]
        assert captions[name] in page


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
    for path in out.glob("*/samples-*.jsonl"):
        path.write_text(path.read_text().replace("node-a", "<b>node</b>"))
    text = _page(out)
    page = PageReader(text)
    assert not {"img", "b"} & set(page.tags)
    assert page.tags.count("script") == 1
    assert "&lt;img src=x onerror=alert(1)&gt;" in text
    assert HOSTILE.capitalize() in _answer(out).headline


def test_the_terminal_shows_the_tables(realistic: tuple[Path, WrittenReport]) -> None:
    console = Console(file=io.StringIO(), width=180)
    console.print(realistic[1].table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    line = next(line for line in text.splitlines() if line.strip().startswith("decoder"))
    assert "91.8 + 173 = 265" in line and " 57 " in line
    for title in ("Weak scaling", "Strong scaling", "A module alone", "First steps", "Memory of weak-4"):
        assert title in text


def test_the_command_report_recognises_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = _small(tmp_path)
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
    out = _small(tmp_path)
    (out / "report").write_text("in the way")
    with pytest.raises(RunError, match="cannot write the report"):
        write_profile_page(out)


def test_scalings_keep_the_order_of_a_step(realistic: tuple[Path, WrittenReport]) -> None:
    profile: Profile = read_profile(realistic[0])
    scalings: list[Scaling] = all_scalings(profile)
    assert [s.kind for s in scalings] == ["weak", "strong", "encoder", "decoder", "postproc"]
    assert list(scalings[0].costs)[:3] == ["trainloader", "h2d", "encoder"]
    assert list(scalings[0].costs)[-1] == STEP
