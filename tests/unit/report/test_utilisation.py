"""Utilisation and memory in the report: from recorded files to the numbers drawn."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from speechdp.report.kit.canvas import Canvas
from speechdp.report.kit.outside import load_text, outside_sentences, shares_gpus
from speechdp.report.kit.theme import PRINT
from speechdp.report.kit.utilisation import (
    CPU_AXIS,
    GPU_AXIS,
    MAX_BARS,
    MAX_LINES,
    MemoryBar,
    draw_memory,
    draw_utilisation,
    utilisation_course,
)
from speechdp.report.runs.derived import sweep_figures
from speechdp.report.runs.folders import read_run, read_sweep
from speechdp.report.runs.results import GpuConditions, RankTiming, RunTiming
from speechdp.report.runs.samples import Samples, read_samples
from speechdp.report.runs.steadiness import notable_load
from speechdp.report.sweep.answer import find_answer, starting_kernels
from speechdp.report.sweep.report import write_report
from speechdp.timing.load import OutsideLoad
from speechdp.timing.memory import memory_balance, peak_memory
from tests.helpers.runs import MadeUpRun, realistic_sweep, write_run, write_sweep
from tests.helpers.usage_files import GB, add_memory, write_samples


@pytest.fixture
def drawing() -> tuple[Axes, Canvas]:
    return Figure().add_subplot(), Canvas(PRINT, {}, {})


def sampled(tmp_path: Path, columns: Sequence[Sequence[float]], host: str = "a", **options: Any) -> Samples:
    return read_samples(write_samples(tmp_path, host, columns, **options))


def test_a_point_is_the_mean_of_its_interval(tmp_path: Path) -> None:
    """Ten seconds of 100 and then ten of 0; half a second is a point."""
    course = utilisation_course([sampled(tmp_path, [[100.0] * 100 + [0.0] * 100])])
    assert course is not None and not course.on_gpus
    middle = len(course.t_s) // 2
    assert (course.values[: middle - 1] == 100).all() and (course.values[middle + 1 :] == 0).all()
    assert np.diff(course.t_s) == pytest.approx(0.5, rel=0.02)
    assert course.labels == ("rank 0",)


def test_every_sample_counts_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    values = rng.uniform(0, 100, 997)
    course = utilisation_course([sampled(tmp_path, [values.tolist()])])
    assert course is not None and len(course.t_s) <= 250
    assert course.values.mean() == pytest.approx(values.mean(), rel=0.01)


def _rewrite_times(path: Path, times: Sequence[float]) -> None:
    head, *lines = path.read_text().splitlines()
    records = [json.loads(line) | {"t_s": t} for line, t in zip(lines, times, strict=True)]
    path.write_text("".join(f"{line}\n" for line in (head, *map(json.dumps, records))))


def test_a_late_sampler_leaves_no_gap(tmp_path: Path) -> None:
    """A short run, whose intervals are as short as its bins would be, of a sampler that is often late."""
    path = write_samples(tmp_path, "a", [[50.0] * 40])
    jitter = np.random.default_rng(1).uniform(0, 0.15, 40)
    _rewrite_times(path, (np.arange(40) * 0.11 + jitter + np.where(np.arange(40) > 20, 0.9, 0)).tolist())
    course = utilisation_course([read_samples(path)])
    assert course is not None and np.diff(course.t_s).min() > 0.19
    assert course.values[:, 0] == pytest.approx(50)


def test_the_pause_before_a_resume_stays_a_gap(tmp_path: Path) -> None:
    path = write_samples(tmp_path, "a", [[50.0] * 40])
    first = path.read_text()
    _rewrite_times(path, [10 + n / 10 for n in range(40)])
    path.write_text(first + path.read_text())
    course = utilisation_course([read_samples(path)])
    assert course is not None
    pause = (course.t_s > 4.5) & (course.t_s < 9.5)
    assert np.isnan(course.values[pause]).all() and (course.values[~pause] == 50).sum() > 10


def test_gpus_are_named_with_their_ranks_and_hosts_stand_side_by_side(
    tmp_path: Path, drawing: tuple[Axes, Canvas]
) -> None:
    hosts = [sampled(tmp_path, [[90.0] * 50, [60.0] * 50], host, gpus=True) for host in ("a", "b")]
    ax, canvas = drawing
    assert draw_utilisation(ax, hosts, canvas)
    assert ax.get_ylabel() == GPU_AXIS
    assert sorted(canvas.tips.values())[:2] == [
        "a GPU 0 (rank 0): mean 90 %, most 90 %",
        "a GPU 1 (rank 1): mean 60 %, most 60 %",
    ]
    legend = ax.get_legend()
    assert legend is not None and len(legend.get_texts()) == 4
    # By NVML's numbers where the file has them: as the texts of the page and nvidia-smi call them.
    path = write_samples(tmp_path, "c", [[90.0] * 50], gpus=True)
    path.write_text(path.read_text().replace('"gpus": ["H200"]', '"gpus": ["H200"], "gpu_numbers": [3]', 1))
    course = utilisation_course([read_samples(path)])
    assert course is not None and course.labels == ("GPU 3 (rank 0)",)


def test_without_a_gpu_the_axis_says_what_is_shown(tmp_path: Path, drawing: tuple[Axes, Canvas]) -> None:
    ax, canvas = drawing
    assert draw_utilisation(ax, [sampled(tmp_path, [[250.0] * 50])], canvas)
    assert ax.get_ylabel() == CPU_AXIS and ax.get_ylim()[1] > 250
    assert ax.get_legend() is None


def test_many_ranks_are_drawn_as_their_median_and_range(tmp_path: Path, drawing: tuple[Axes, Canvas]) -> None:
    ax, canvas = drawing
    columns = [[float(10 * r)] * 50 for r in range(MAX_LINES + 1)]
    assert draw_utilisation(ax, [sampled(tmp_path, columns)], canvas)
    assert list(canvas.tips.values()) == ["median of 9: mean 40 %, most 40 %", "least to most of 9"]


def test_nothing_is_drawn_of_a_run_that_ended_before_its_first_sample(
    tmp_path: Path, drawing: tuple[Axes, Canvas]
) -> None:
    ax, canvas = drawing
    assert not draw_utilisation(ax, [sampled(tmp_path, [[]])], canvas)
    assert not draw_utilisation(ax, [], canvas)
    assert not draw_memory(ax, [], canvas, on_gpus=False)


def test_what_a_gpu_does_not_tell_is_no_line_of_it(tmp_path: Path) -> None:
    path = write_samples(tmp_path, "a", [[50.0] * 9], gpus=True)
    path.write_text(path.read_text().replace("[0, 50.0,", "[0, null,"))
    course = utilisation_course([read_samples(path)])
    assert course is not None and not course.on_gpus and (course.values[~np.isnan(course.values)] == 3).all()


def test_memory_bars_say_how_even_the_ranks_are(drawing: tuple[Axes, Canvas]) -> None:
    ax, canvas = drawing
    bars = [MemoryBar(f"rank {r}", "#000000", (r + 4) * 0.5 * GB) for r in range(2)]
    assert draw_memory(ax, bars, canvas, on_gpus=True)
    assert ax.get_xlabel() == "peak GPU memory of tensors (torch); most / least rank 1.25"
    assert list(canvas.tips.values()) == ["rank 0: 2.00 GB at most", "rank 1: 2.50 GB at most"]
    ax.clear()
    canvas.tips.clear()
    assert draw_memory(ax, [MemoryBar("rank 0", "#000000", 4e8, live_bytes=3e8)], canvas, on_gpus=False)
    assert list(canvas.tips.values()) == ["rank 0: 400 MB at most, 300 in use"]
    ax.clear()
    assert draw_memory(ax, bars * MAX_BARS, canvas, on_gpus=False)
    assert [text.get_text() for text in ax.get_yticklabels()] == ["rank 0", "rank 1", "rank 1"]


def test_memory_balance() -> None:
    assert memory_balance([3, 2, 2.5]) == 1.5
    assert memory_balance([]) is None and memory_balance([0.0]) is None


def test_the_peak_of_this_process_is_its_own() -> None:
    found = peak_memory(torch.device("cpu"))
    assert list(found) == ["peak_rss_bytes", "live_rss_bytes"]
    assert 0 < found["live_rss_bytes"] <= found["peak_rss_bytes"] * 1.02
    held = np.ones(64_000_000 // 8)
    grown = peak_memory(torch.device("cpu"))["peak_rss_bytes"]
    del held
    after = peak_memory(torch.device("cpu"))["peak_rss_bytes"]
    # The kernel's counts are a little late; in bytes, not in kB taken for more.
    assert after == pytest.approx(grown, rel=0.02)
    assert 64e6 < grown < 100 * GB


def test_one_runs_report_shows_its_ranks(tmp_path: Path) -> None:
    run = write_run(MadeUpRun("one"), tmp_path)
    write_samples(run, "a", [[97.0] * 300, [41.0] * 300], gpus=True)
    add_memory(run, [1.5 * GB, 1.5 * GB], [2.0 * GB, 2.2 * GB])
    page = write_report(run).html.read_text()
    assert "GPU 1 (rank 1): mean 41 %" in page and "GPU utilisation (NVML)" in page
    assert "rank 1: 2.20 GB at most" in page and "most / least rank 1.10" in page
    assert '<figure id="plot-utilisation">' in page and '<figure id="plot-memory">' in page


def test_a_sweeps_report_shows_its_runs(tmp_path: Path) -> None:
    out = write_sweep(tmp_path / "sweep", realistic_sweep()[:3])
    write_samples(out / "one-rank", "a", [[100.0] * 30])
    write_samples(out / "model_averaging-1", "a", [[80.0] * 30, [60.0] * 30])
    add_memory(out / "model_averaging-1", [0.3 * GB, 0.4 * GB])
    page = write_report(out).html.read_text()
    assert "period 1: mean 70 %" in page and "one rank: mean 100 %" in page
    assert "period 1: 400 MB at most (most / least 1.33)" in page


def test_clocks_are_drawn_where_they_were_read(tmp_path: Path) -> None:
    run = write_run(MadeUpRun("one"), tmp_path)
    path = write_samples(run, "a", [[97.0] * 300, [41.0] * 300], gpus=True)
    page = write_report(run).html.read_text()
    assert '<figure id="plot-clocks">' in page and "GPU 1 (rank 1): mean 1980 MHz, least 1980 MHz" in page
    path.write_text(path.read_text().replace(", 1980]", ", null]"))
    assert "plot-clocks" not in write_report(run).html.read_text()
    out = write_sweep(tmp_path / "sweep", realistic_sweep()[1:3])
    write_samples(out / "model_averaging-1", "a", [[80.0] * 30], gpus=True)
    write_samples(out / "gradient_averaging", "a", [[80.0] * 30])
    page = write_report(out).html.read_text()
    assert "period 1: mean 1980 MHz" in page and "gradient averaging: mean 1980" not in page


def test_a_page_names_what_a_run_did_not_have_to_itself(tmp_path: Path) -> None:
    def notes(run: MadeUpRun) -> str:
        page = write_report(write_run(run, tmp_path)).html.read_text().replace("\u00a0", " ")
        found = re.search(r'<dl id="outside-notes">(.*?)</dl>', page, re.DOTALL)
        return found[1] if found else ""

    gpu = {"index": 2, "clock_mhz": 1965, "lowest_clock_mhz": 1200, "limits": {"power": 0.12, "heat": 0.001},
           "others": 0.5, "most_others": 2, "others_bytes": 20e9}  # fmt: skip
    shown = notes(MadeUpRun("shared", gpu=gpu, others=0.4, stolen=0.2))
    assert (
        "SM clock while a kernel ran: median 1,965 MHz, lowest 1,200 MHz. "
        "The clock was held down by the power limit for 12 % of the time a kernel ran. "
        "GPU 2: up to 2 other processes (in the mean 0.5 with 20.00 GB). "
        "0.4 cores busy with other work and 0.2 stolen by the virtual machine&#39;s host."
    ) in shown
    alone = notes(
        MadeUpRun("alone", gpu={**gpu, "others": 0, "most_others": 0, "others_bytes": 4e6}, others=0.0)
    )
    assert "No other process was seen on the GPU." in alone and "cores busy" not in alone
    hidden = notes(MadeUpRun("hidden", gpu={**gpu, "others": 0, "most_others": 0}))
    assert "GPU 2: 20.00 GB held by others on average, whose processes are not listed." in hidden
    # Of a GPU of which nothing was read, and of a CPU, nothing is said, but that cores were stolen.
    assert "SM clock" not in notes(MadeUpRun("unread", gpu={"index": 0}, others=0.0))
    assert notes(MadeUpRun("cpu", others=1.4)) == ""
    assert "1.4 cores busy with other work and 0.3 stolen" in notes(MadeUpRun("vm", others=1.4, stolen=0.3))


def of_gpus(tmp_path: Path, *gpus: GpuConditions) -> list[str]:
    """Return what is said of a run with a rank on each of these GPUs."""
    ranks = tuple(RankTiming(n, "a", 1, 1, 1.0, {}, gpu=gpu) for n, gpu in enumerate(gpus))
    run = MadeUpRun(f"of-gpus-{len(list(tmp_path.iterdir()))}")
    return outside_sentences(
        dataclasses.replace(read_run(write_run(run, tmp_path)), timing=RunTiming(4, ranks))
    )


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        # Who was there for a moment was there.
        (GpuConditions(3, others=0.03, most_others=3, others_bytes=5e9),
         "GPU 3: up to 3 other processes (in the mean 0.03 with 5.00 GB)."),
        (GpuConditions(3, others=0.03, most_others=3, others_bytes=1e8),
         "GPU 3: up to 3 other processes (in the mean 0.03 with 0.10 GB)."),
        (GpuConditions(3, others=0.0, most_others=1, others_bytes=1e6),
         "GPU 3: up to 1 other process (in the mean less than 0.01)."),
        (GpuConditions(3, others=1.0, most_others=1), "GPU 3: 1 other process."),
        (GpuConditions(3, others=0.0, most_others=0, others_bytes=1e8),
         "No other process was seen on the GPU."),
        (GpuConditions(3, limits={"power": 0.5, "heat": 0.25}),
         "The clock was held down by the power limit for 50\u00a0% of the time a kernel ran, by heat for "
         "25\u00a0%."),
    ],
)  # fmt: skip
def test_a_gpus_conditions_are_told_by_what_was_read(gpu: GpuConditions, said: str, tmp_path: Path) -> None:
    assert of_gpus(tmp_path, gpu) == [said]


def test_a_gpu_whose_limits_were_not_read_lowers_no_mean(tmp_path: Path) -> None:
    known, free, unread = (
        GpuConditions(0, limits={"heat": 0.5}),
        GpuConditions(1, limits={}),
        GpuConditions(2),
    )
    assert of_gpus(tmp_path, unread) == []
    for gpus, percent in (((known, unread), 50), ((known, free, unread), 25)):
        (said,) = of_gpus(tmp_path, *gpus)
        assert f"held down by heat for {percent}\u00a0% of the time" in said


def test_a_visitor_of_a_moment_is_no_cause(tmp_path: Path) -> None:
    def shares(**gpu: float) -> bool:
        found = {"index": 0, **gpu}
        return shares_gpus(
            read_run(write_run(MadeUpRun(f"run-{len(list(tmp_path.iterdir()))}", gpu=found), tmp_path))
        )

    assert not shares(others=0.03, most_others=3, others_bytes=1e8)
    assert shares(others=0.6, most_others=1) and shares(others=0, most_others=0, others_bytes=5e9)


@pytest.mark.parametrize(
    ("others", "stolen", "text"),
    [
        (0.4, 0.2, "0.4 cores busy with other work and 0.2 stolen by the virtual machine's host"),
        (0.0, 0.5, "0.5 cores stolen by the virtual machine's host"),
        (1.4, 0.0, "1.4 cores busy with other work"),
        (1.4, 0.01, "1.4 cores busy with other work"),
        (0.04, 0.03, "0.04 cores busy with other work and 0.03 stolen by the virtual machine's host"),
        (1.0, 1.0, "1 core busy with other work and 1 stolen by the virtual machine's host"),
        (0.0, 1.0, "1 core stolen by the virtual machine's host"),
        (0.0, 0.0, "0 cores busy with other work"),
        (120.4, 0.0, "120 cores busy with other work"),
    ],
)
def test_cores_that_were_not_the_jobs_are_named_without_a_part_that_is_zero(
    others: float, stolen: float, text: str
) -> None:
    assert load_text(OutsideLoad(others, stolen)) == text


def test_cores_count_from_a_share_for_each_rank_on_the_host(tmp_path: Path) -> None:
    """As where they are named as a cause; two ranks with 0.09 cores between them lost nothing."""
    for others, is_said in ((0.09, False), (0.11, True)):
        made = MadeUpRun(f"run-{others}", size=2, others=others, gpu={"index": 0})
        run = read_run(write_run(made, tmp_path))
        assert bool(outside_sentences(run)) == is_said == (notable_load(run) is not None)


def test_gpus_of_several_hosts_are_taken_together(tmp_path: Path) -> None:
    def rank(number: int, clock: float, others: int) -> RankTiming:
        gpu = GpuConditions(number % 4, clock, clock - 100, {"heat": number / 8}, others, others, None)
        return RankTiming(number, "ab"[number // 4], 1, 1, 1.0, {}, gpu=gpu)

    timing = RunTiming(4, tuple(rank(n, 1900.0 + n, others=n // 3) for n in range(8)))
    run = dataclasses.replace(read_run(write_run(MadeUpRun("one"), tmp_path)), timing=timing)
    assert outside_sentences(run) == [
        "SM clock while a kernel ran: median 1,900 to 1,907 MHz, lowest 1,800 MHz (GPU 0 on a).",
        "Clocks were held down by heat for 44\u00a0% of the time a kernel ran.",
        "GPU 3 on a: 1 other process; GPU 0 on b: 1 other process; GPU 1 on b: 1 other process; "
        "GPU 2 on b: 2 other processes; and others on 1 more GPU.",
    ]


def test_what_was_not_recorded_is_not_shown(tmp_path: Path) -> None:
    run = write_run(MadeUpRun("old"), tmp_path)
    page = write_report(run).html.read_text()
    assert (
        "plot-utilisation" not in page
        and "plot-memory" not in page
        and 'id="sampling"' not in page
        and "outside-notes" not in page
    )
    add_memory(run, [0.3 * GB, 0.4 * GB])
    page = write_report(run).html.read_text()
    assert "plot-utilisation" not in page and "plot-memory" in page


def test_a_damaged_file_is_a_problem_not_an_error(tmp_path: Path) -> None:
    run = write_run(MadeUpRun("one"), tmp_path)
    path = write_samples(run, "a", [[97.0] * 30])
    path.write_text(path.read_text() + '{"notice": "GPU 0: power: <b>Not Supported</b>"}\n{"t_s')
    (run / "timeline" / "samples-b.jsonl").write_text("")
    page = write_report(run).html.read_text()
    assert "Not read: GPU 0: power: &lt;b&gt;Not Supported" in page
    problems = read_sweep(run).runs[0].problems
    assert [re.sub(r"\(.*", "", problem).strip() for problem in problems] == [
        "timeline/samples-a.jsonl: 1 damaged line passed over",
        "timeline/samples-b.jsonl: holds no samples",
    ]
    assert read_run(run).samples == ()


def test_a_gpu_that_waits_for_the_hosts_kernels_is_said_to(tmp_path: Path) -> None:
    def said(gpu: float, core: float, *, gpus: bool = True) -> str:
        found = sampled(tmp_path, [[gpu] * 30, [gpu + 10] * 30], gpus=gpus)
        core_percent = np.full_like(found.cpu_percent, core)
        core_percent[:10] = 5.0  # start and evaluation
        return starting_kernels([dataclasses.replace(found, cpu_percent=core_percent)])

    assert said(40, 101).startswith("a kernel runs on a GPU 45\u00a0% of the time, while")
    assert "keeps a core busy (101\u00a0%)" in said(40, 101)
    assert said(40, 60) == said(90, 101) == said(40, 101, gpus=False) == ""
    assert said(math.nan, 101) == starting_kernels([]) == ""


def test_the_answer_names_the_host_where_nothing_else_holds_a_run_back(tmp_path: Path) -> None:
    for name, comm_share in (("a", 0.01), ("b", 0.3)):
        spans = (0.01, 0.0, 0.28, 0.66 - comm_share, comm_share, 0.05)
        run = write_run(MadeUpRun(name, spans=spans), tmp_path / name)
        path = write_samples(run, "a", [[30.0] * 40], gpus=True)
        path.write_text(path.read_text().replace("[[0, 3.0", "[[0, 100.0"))
    said = {name: find_answer(sweep_figures(read_sweep(tmp_path / name), None)).limit for name in "ab"}
    assert "is the host: a kernel runs on a GPU 30" in said["a"]
    assert "is communication itself" in said["b"] and "kernel" not in said["b"]
