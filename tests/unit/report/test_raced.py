"""Speeds by a race: the ratio and its interval, and what reports say of them."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import math
import random
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from speechdp.report.compare.report import write_comparison as write_comparison_report
from speechdp.report.kit.pages import WrittenReport
from speechdp.report.kit.speeds import choose_fastest, faster_than, times_text
from speechdp.report.runs import raced
from speechdp.report.runs.raced import LEAST_ROUNDS, RacedSpeed
from speechdp.report.sweep.report import write_report
from tests.helpers.comparisons import MadeUpStrategy, write_comparison
from tests.helpers.races import made_up_race, write_made_up_race
from tests.helpers.runs import disturb, realistic_sweep, write_sweep
from tests.helpers.terminal import on_terminal

#: As the runs of `realistic_sweep` would race on a quiet machine; period 16 is the fastest accurate one.
SPEEDS = {
    "one-rank": 0.70,
    "gradient_averaging": 1.0,
    "model_averaging-1": 0.85,
    "model_averaging-4": 1.11,
    "model_averaging-16": 1.21,
    "model_averaging-64": 1.24,
}


@pytest.mark.parametrize("draw", [
    lambda d: d.lognormvariate(0.2, 0.3), lambda d: math.exp(d.random()),
    lambda d: math.exp(d.gauss(0.0, 2.0 if d.random() < 0.2 else 0.1)),  # disturbed a fifth of the time
])  # fmt: skip
@pytest.mark.parametrize("rounds", [6, 7, 12, 25])
def test_the_interval_holds_the_ratio_in_95_of_100_races(
    draw: Callable[[random.Random], float], rounds: int
) -> None:
    drawn = random.Random(rounds)
    truth = statistics.median(draw(drawn) for _ in range(20_000))
    held = 0
    for _ in range(1_000):
        interval = RacedSpeed(tuple(draw(drawn) for _ in range(rounds)), "b").interval
        assert interval is not None
        held += interval[0] <= truth <= interval[1]
    assert held >= 930  # 950 on average at least; 3 standard deviations of a binomial are 21


def test_the_interval_is_as_narrow_as_it_may_be() -> None:
    """Tables of the signed-rank test: the largest sum of ranks that is rare enough, with both sides 5 %."""
    tables = {6: 0, 7: 2, 8: 3, 9: 5, 10: 8, 12: 13, 15: 25, 20: 52, 25: 89, 30: 137, 50: 434}
    for rounds, largest in tables.items():
        ratios = [random.Random(rounds).lognormvariate(0, 1) for _ in range(rounds)]
        ratios = [ratio * (1 + number / 1_000) for number, ratio in enumerate(ratios)]
        pairs = sorted(math.sqrt(a * b) for a, b in itertools.combinations_with_replacement(ratios, 2))
        expected = pairs[largest], pairs[-1 - largest]
        assert RacedSpeed(tuple(ratios), "b").interval == pytest.approx(expected, rel=1e-12)


def test_the_interval_of_many_rounds_is_at_most_a_little_wider_than_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = range(61, 121, 10)
    quick = [raced._signed_rank(rounds, 0.05) for rounds in ranks]
    monkeypatch.setattr(raced, "_MANY", 121)
    raced._signed_rank.cache_clear()
    counted = [raced._signed_rank(rounds, 0.05) for rounds in ranks]
    raced._signed_rank.cache_clear()
    assert all(exact - 2 <= one <= exact for one, exact in zip(quick, counted, strict=True))


def test_three_rounds_of_24_that_are_far_off_leave_the_interval_where_it_is() -> None:
    drawn = random.Random(1)
    usual = tuple(drawn.gauss(1.2, 0.01) for _ in range(21))
    for far in (0.4, 3.0):
        interval = RacedSpeed((*usual, *(far,) * 3), "b").interval
        assert interval is not None and 1.17 < interval[0] < interval[1] < 1.23


def test_the_ratio_of_two_is_the_same_from_either_side_and_rounds_far_off_count_little() -> None:
    drawn = random.Random(1)
    one, other = (RacedSpeed(tuple(drawn.lognormvariate(0, 0.2) for _ in range(10)), "b") for _ in range(2))
    assert one.over(other).ratio == pytest.approx(1 / other.over(one).ratio)
    assert RacedSpeed((1.2,) * 8 + (50.0,) * 2, "b").ratio == pytest.approx(1.2)


def test_fewer_rounds_have_no_interval_and_tell_nothing_apart() -> None:
    few, fast = RacedSpeed((1.0,) * (LEAST_ROUNDS - 1), "b"), RacedSpeed((2.0,) * (LEAST_ROUNDS - 1), "b")
    assert RacedSpeed((1.0,) * LEAST_ROUNDS, "b").interval == (1.0, 1.0)
    assert (few.ratio, few.interval) == (1.0, None)
    assert not few.is_apart_from(fast) and not fast.is_faster_than(few)


def test_settings_are_compared_within_their_rounds() -> None:
    """What disturbs the baseline's turns widens both intervals, and does not make the two alike."""
    slow = RacedSpeed((1.0, 1.5, 1.1, 1.4, 1.2, 1.3, 0.9, 1.6, 1.0, 1.5, 1.1, 1.4), "b")
    fast = RacedSpeed(tuple(1.01 * ratio for ratio in slow.ratios), "b")
    assert slow.interval is not None and fast.interval is not None
    assert fast.interval[0] < slow.interval[1]  # they overlap
    assert slow.is_apart_from(fast) and fast.is_apart_from(slow)
    assert fast.is_faster_than(slow) and not slow.is_faster_than(fast)
    assert fast.over(slow).ratio == pytest.approx(1.01)


def test_settings_that_are_as_fast_are_told_apart_in_5_of_100_races() -> None:
    """Whatever the machine and the baseline do meanwhile."""
    drawn, apart = random.Random(3), 0
    for _ in range(1_000):
        disturbed = [drawn.lognormvariate(0, 0.3) for _ in range(12)]
        one, other = (
            RacedSpeed(tuple(value * drawn.gauss(1.0, 0.02) for value in disturbed), "b") for _ in range(2)
        )
        apart += one.is_apart_from(other)
    assert apart <= 70  # 42 on average; the level is 50, of which 3 standard deviations are 21


def test_settings_are_apart_where_nearly_all_rounds_say_the_same() -> None:
    """Of 6 rounds all must; of 12 eleven, or ten where the other two say little."""
    slow = RacedSpeed((1.0,) * 12, "b")
    assert RacedSpeed((1.1,) * 11 + (0.9,), "b").is_apart_from(slow)
    assert not RacedSpeed((1.1,) * 10 + (0.9,) * 2, "b").is_apart_from(slow)
    assert RacedSpeed((1.1,) * 10 + (0.95,) * 2, "b").is_apart_from(slow)
    assert not slow.is_apart_from(slow)
    assert RacedSpeed((1.1,) * 6, "b").is_apart_from(RacedSpeed((1.0,) * 6, "b"))
    assert not RacedSpeed((1.1,) * 5 + (1.0,), "b").is_apart_from(RacedSpeed((1.0,) * 6, "b"))


@dataclass(frozen=True)
class Row:
    raced: RacedSpeed | None
    score: float | None


#: The fastest in 7 rounds and the slowest in 5; the other two are always in the same order.
FASTEST = Row(RacedSpeed((1.3,) * 7 + (1.0,) * 5, "b"), -1.02)
SECOND = Row(RacedSpeed((1.2,) * 12, "b"), -1.01)
ACCURATE = Row(RacedSpeed((1.1,) * 12, "b"), -1.0)
#: The throughput of their runs, and of one that did not race.
OF_RUNS = {-1.02: 50.0, -1.01: 60.0, -1.0: 70.0, -0.9: 90.0}


def of_runs(row: Row) -> float:
    return OF_RUNS[row.score or 0.0]


def test_none_is_chosen_than_which_another_is_known_to_be_faster() -> None:
    """None of the two can be told from the fastest; the most accurate is slower than the second."""
    assert choose_fastest([FASTEST, SECOND, ACCURATE], of_runs) == (SECOND, [FASTEST])
    assert choose_fastest([FASTEST, ACCURATE], of_runs) == (ACCURATE, [FASTEST])
    assert faster_than(ACCURATE, [FASTEST, ACCURATE], of_runs) is None  # that has the larger median
    assert faster_than(ACCURATE, [SECOND, ACCURATE], of_runs) == SECOND


@pytest.mark.parametrize(("width", "expected"), [(80, ["log-prob"]), (100, ["log-prob", "WER"])])
def test_a_narrow_terminal_shows_speed_and_accuracy(tmp_path: Path, width: int, expected: list[str]) -> None:
    """The usual terminals showed how fast each period was, and not how accurate."""
    shown = on_terminal(raced_report(tmp_path, SPEEDS).table, width)
    heads = shown[: shown.index("one-rank")]
    assert all(title in heads for title in ["period", "frames/s", "raced speed", *expected])
    assert "Only on the page: strategy, ranks, speed-up" in " ".join(shown.split())


def test_a_run_is_not_compared_with_what_raced() -> None:
    """Its throughput is larger than any ratio."""
    did_not = Row(None, -0.9)
    assert choose_fastest([did_not, SECOND, ACCURATE], of_runs) == (SECOND, [])
    assert faster_than(SECOND, [did_not, SECOND], of_runs) is None
    assert choose_fastest([did_not, Row(None, -1.0)], of_runs) == (did_not, [])
    assert faster_than(did_not, [did_not, SECOND], of_runs) is None


def test_few_rounds_choose_the_fastest() -> None:
    rows = [Row(RacedSpeed((1.2,) * 3, "b"), -1.01), Row(RacedSpeed((1.1,) * 3, "b"), -1.0)]
    assert choose_fastest(rows, of_runs) == (rows[0], [])
    assert faster_than(rows[1], rows, of_runs) == rows[0]


def test_without_an_interval_a_ratio_written_as_1_is_not_faster() -> None:
    rows = [Row(RacedSpeed((1.004,) * 3, "b"), -1.01), Row(RacedSpeed((1.0,) * 3, "b"), -1.0)]
    assert faster_than(rows[1], rows, of_runs) is None


def test_nobody_is_left_out_where_each_is_known_to_be_slower_than_another() -> None:
    """Twelve in a circle: each is ahead of the next in 22 of 24 rounds."""
    rounds = [[(place - number) % 12 for place in range(12)] for number in range(24)]
    rows = [Row(RacedSpeed(tuple(2.0 - turns[n] / 20 for turns in rounds), "b"), -1.0) for n in range(12)]
    assert all(faster_than(row, [rows[n - 1], row], of_runs) for n, row in enumerate(rows))
    assert choose_fastest(rows, of_runs) == (rows[0], [])


def test_the_fastest_of_many_is_left_out_in_5_of_100_races_at_most() -> None:
    """Of twelve that are as fast as one another each is the fastest; by pairs 15 in 100 would be left out."""
    drawn, left_out = random.Random(5), 0
    for _ in range(200):
        rows = [Row(RacedSpeed(tuple(drawn.lognormvariate(0, 0.05) for _ in range(12)), "b"), -1.0)
                for _ in range(12)]  # fmt: skip
        chosen, alike = choose_fastest(rows, of_runs)
        left_out += rows[0] is not chosen and not any(rows[0] is row for row in alike)
    assert left_out <= 19  # 10 by the level, of which 3 standard deviations are 9


def test_six_rounds_that_all_say_the_same_tell_many_settings_apart() -> None:
    slow, fast = RacedSpeed((1.0,) * 6, "b"), RacedSpeed((1.1,) * 6, "b")
    assert fast.is_faster_than(slow, among=12)
    assert not RacedSpeed((1.1,) * 5 + (0.99,), "b").is_faster_than(slow, among=12)


def test_ratios_of_a_round_do_not_drift_with_the_machine() -> None:
    speeds = made_up_race(SPEEDS, noise=0.0).speeds()
    assert {name: speed.ratio for name, speed in speeds.items()} == pytest.approx(SPEEDS)


def raced_report(tmp_path: Path, speeds: dict[str, float], **changes: object) -> WrittenReport:
    out = write_sweep(tmp_path / "sweep", realistic_sweep())
    write_made_up_race(out, made_up_race(speeds, **changes))  # type: ignore[arg-type]
    return write_report(out)


def test_a_sweep_is_ranked_by_its_race(tmp_path: Path) -> None:
    """The runs themselves say that period 4 is slower than period 16; the race says the reverse."""
    answer = raced_report(tmp_path, {**SPEEDS, "model_averaging-4": 1.5}).answer
    rests_on = "judging by one seed: 1."
    assert answer[0].startswith(f"Period 4 seems the fastest setting that keeps the accuracy, {rests_on}")
    assert "times the speed of gradient averaging, 19,800 frames/s on 2 ranks in its run " in answer[0]
    assert "(in the race 2.1" in answer[0]
    assert not any("cannot be told apart" in sentence for sentence in answer)


def test_what_the_race_cannot_tell_apart_is_said_and_the_most_accurate_chosen(tmp_path: Path) -> None:
    answer = raced_report(tmp_path, {**SPEEDS, "model_averaging-4": 1.215}, noise=0.03).answer
    assert answer[0].startswith(
        "No setting that keeps the accuracy, judging by one seed, is known to be faster than period 4: 1."
    )
    assert "Its speed cannot be told apart from that of period 16 (1.2" in answer[0]


def test_periods_that_are_not_chosen_are_not_told_apart_either(tmp_path: Path) -> None:
    slow = {"model_averaging-1": 0.5, "model_averaging-4": 0.8, "model_averaging-16": 0.802}
    speeds = {**SPEEDS, **slow, "model_averaging-64": 0.5}
    answer = raced_report(tmp_path, speeds, noise=0.02).answer
    assert answer[0].startswith("Gradient averaging seems the fastest setting that keeps the accuracy")
    (sentence,) = [sentence for sentence in answer if "averaging period that" in sentence]
    assert sentence.startswith("No averaging period that keeps the accuracy is known to be faster than ")


def test_table_page_and_csv_have_the_ratio_and_its_interval(tmp_path: Path) -> None:
    report = raced_report(tmp_path, SPEEDS)
    rows = {row["run"]: row for row in csv.DictReader(io.StringIO(report.csv.read_text()))}
    row = rows["model_averaging-16"]
    low, ratio, high = (float(row[f"raced_speed{end}"]) for end in ("_low", "", "_high"))
    assert low < ratio < high and ratio == pytest.approx(1.21, rel=0.02)
    assert float(row["frames_per_s"]) == pytest.approx(21_650, rel=0.01)  # beside it, as the run had it
    assert float(row["speedup"]) == pytest.approx(1.21 / 0.70, rel=0.02)
    page = report.html.read_text(encoding="utf-8").replace("\u00a0", " ")
    assert "raced speed" in page and f"{ratio:.2f} [{low:.2f}, {high:.2f}]" in page
    assert "Race on 2 ranks, begun 2026-11-23 15:42 UTC: 12 rounds" in page
    assert "Load from outside meanwhile: 0.3 cores busy with other work." in page
    assert "times the baseline" in page  # the plot of speed against the period


def test_stolen_cores_are_named_apart_from_other_work(tmp_path: Path) -> None:
    out = write_sweep(tmp_path / "sweep", realistic_sweep())
    race = made_up_race(SPEEDS)
    stolen = tuple({**load, "stolen": 0.4} for load in race.load)
    write_made_up_race(out, dataclasses.replace(race, load=stolen))
    page = write_report(out).html.read_text(encoding="utf-8").replace("\u00a0", " ")
    said = "0.3 cores busy with other work and 0.4 stolen by the virtual machine&#39;s host."
    assert f"Load from outside meanwhile: {said}" in page
    little = tuple({**load, "host": load["own"] * race.plan.ranks + 0.09} for load in race.load)
    write_made_up_race(out, dataclasses.replace(race, load=little))
    assert "Load from outside" not in write_report(out).html.read_text(encoding="utf-8")


def test_runs_that_are_links_to_another_disk_have_raced_all_the_same(tmp_path: Path) -> None:
    """They were called by the folders linked to, so that nothing had raced, nor was there a baseline."""
    out = raced_report(tmp_path, SPEEDS).csv.parent.parent
    before = write_report(out).csv.read_text()
    for name in ("one-rank", "model_averaging-16"):
        (out / name).rename(tmp_path / f"elsewhere-{name}")
        (out / name).symlink_to(tmp_path / f"elsewhere-{name}")
    assert write_report(out).csv.read_text() == before


def test_without_a_race_everything_is_as_before(tmp_path: Path) -> None:
    report = write_report(write_sweep(tmp_path / "sweep", realistic_sweep()))
    page = report.html.read_text(encoding="utf-8")
    assert "raced speed" not in page and report.answer[0].count("race") == 1
    assert "judging by one seed and without a race: " in report.answer[0]
    assert "21,650 frames/s on 2 ranks (1.74 times one rank" in report.answer[0]


def test_few_rounds_and_settings_left_out_are_said(tmp_path: Path) -> None:
    answer = raced_report(tmp_path, SPEEDS, rounds=3).answer
    assert any(s.startswith("The race on 2 ranks had 3 rounds, too few for intervals (6") for s in answer)
    partly = {name: speed for name, speed in SPEEDS.items() if name != "model_averaging-16"}
    reason = {"model_averaging-16": "its period is long"}
    report = raced_report(tmp_path / "partly", partly, left_out=reason)
    (caution,) = [sentence for sentence in report.answer if "took no part in the race" in sentence]
    assert caution == (
        "Period 16 took no part in the race on 2 ranks: its period is long. So its speed is that of its own "
        "run, and is compared with none of those that raced."
    )
    # By the runs period 16 is the fastest, and its ratio in a race would be 1.21.
    lead = "Period 4 seems the fastest raced setting that keeps the accuracy, judging by one seed: 1.1"
    assert report.answer[0].startswith(lead)


def test_a_setting_added_since_the_race_stands_beside_those_that_raced(tmp_path: Path) -> None:
    before = {name: speed for name, speed in SPEEDS.items() if name != "model_averaging-16"}
    report = raced_report(tmp_path, before)
    assert "Period 16 took no part in the race on 2 ranks: it was added since." in " ".join(report.answer)
    page = report.html.read_text(encoding="utf-8")
    assert 'id="race"' in page and "A setting that did not race is chosen only where" in page
    row, raced = (
        next(row for row in csv.DictReader(io.StringIO(report.csv.read_text())) if row["run"] == name)
        for name in ("model_averaging-16", "model_averaging-4")
    )
    assert float(row["frames_per_s"]) > 0 and row["raced_speed"] == row["speedup"] == row["efficiency"] == ""
    assert float(raced["speedup"]) == pytest.approx(1.11 / 0.70, rel=0.02)


def test_a_race_that_only_one_of_the_settings_took_part_in_compares_none(tmp_path: Path) -> None:
    report = raced_report(tmp_path, {"gradient_averaging": 1.0, "model_averaging-128": 1.2})
    answer = " ".join(report.answer)
    assert (
        "Period 16 took no part in the race on 2 ranks: it was added since. So speeds are those of" in answer
    )
    assert report.answer[0].startswith("Period 16 seems the fastest setting")  # by the runs
    assert "21,650 frames/s" in report.answer[0]
    page = report.html.read_text(encoding="utf-8")
    assert 'id="race"' not in page and "aced speed" not in page


def test_what_was_left_out_and_is_not_compared_is_no_caution(tmp_path: Path) -> None:
    """Speeds of all that are compared are those of the race."""
    report = raced_report(tmp_path, SPEEDS, left_out={"model_averaging-4096": "its period is long"})
    assert "took no part" not in " ".join(report.answer)
    assert "times the speed of gradient averaging" in report.answer[0].replace("\u00a0", " ")


def test_a_comparison_where_some_raced_says_by_what_it_chooses(tmp_path: Path) -> None:
    report = compared(tmp_path, {2: {"one-rank": 0.8, "gradient_averaging": 1.0, "bmuf:period=16": 1.4}})
    page = report.html.read_text(encoding="utf-8").replace("\u00a0", " ")
    assert "the most accurate; frames/s at equal frames where none that is accurate enough raced)" in page
    assert "Race on 2 ranks" in page and "Race on 4 ranks" not in page


def test_a_damaged_record_is_a_caution_and_the_runs_are_shown(tmp_path: Path) -> None:
    out = write_sweep(tmp_path / "sweep", realistic_sweep())
    path = write_made_up_race(out, made_up_race(SPEEDS))
    path.write_text("{", encoding="utf-8")
    answer = write_report(out).answer
    assert answer[0].startswith("Period 16 seems the fastest setting")
    assert any(
        str(path) in sentence and "delete it to hold the race again" in sentence for sentence in answer
    )


def test_a_race_answers_although_the_machine_changed_between_the_runs(tmp_path: Path) -> None:
    out = write_sweep(tmp_path / "sweep", realistic_sweep())
    disturb(out / "model_averaging-16", forward=2.0, others=1.5)
    before = write_report(out).answer
    assert before[0].startswith("The machine was not the same for all runs")
    write_made_up_race(out, made_up_race(SPEEDS))
    after = write_report(out).answer
    assert after[0].startswith("Period 16 seems the fastest setting")
    (caution,) = [sentence for sentence in after if sentence.startswith("The machine was not the same")]
    assert "The race's speeds do not suffer from it" in caution


def compared(
    tmp_path: Path,
    speeds: dict[int, dict[str, float]],
    seeds: tuple[int, ...] = (1,),
    score: float = -0.345,
    ranks: tuple[int, ...] = (1, 2, 4),
    **changes: object,
) -> WrittenReport:
    """Write a comparison; one rank ends at -0.385."""
    strategies = [
        MadeUpStrategy("gradient_averaging", 9_000, score),
        MadeUpStrategy("bmuf:period=16", 8_000, score),
    ]
    out = write_comparison(tmp_path / "out", strategies, ranks, seeds, ("frames",))
    for size, of in speeds.items():
        texts = {"bmuf:period=16": "bmuf:period=16"}
        race = made_up_race(of, ranks=size, strategies=texts, **changes)  # type: ignore[arg-type]
        write_made_up_race(out, race)
    return write_comparison_report(out)


def test_a_choice_of_those_that_raced_says_so(tmp_path: Path) -> None:
    """By the runs elastic averaging is much the fastest."""
    texts = {"gradient_averaging": 9_000.0, "bmuf:period=16": 8_000.0, "easgd": 20_000.0}
    strategies = [MadeUpStrategy(text, speed) for text, speed in texts.items()]
    out = write_comparison(tmp_path / "out", strategies, (1, 2), (1,), ("frames",))
    speeds = {"one-rank": 0.8, "gradient_averaging": 1.0, "bmuf:period=16": 1.4}
    race = made_up_race(
        speeds,
        strategies={"bmuf:period=16": "bmuf:period=16"},
        left_out={"easgd": "what it exchanges changes"},
    )
    write_made_up_race(out, race)
    report = write_comparison_report(out)
    assert report.answer[0].startswith(
        "Bmuf (period=16) seems the best choice, judging by one seed: on 2 ranks it was"
    )
    assert ", of those that raced. " in report.answer[0]
    (caution,) = [sentence for sentence in report.answer if "took no part" in sentence]
    assert "changes. So its speed is that of its own run, and is compared with none" in caution
    found = {row["strategy"]: row for row in csv.DictReader(io.StringIO(report.csv.read_text()))}
    assert found["easgd"]["raced_speed"] == ""


def test_a_comparison_is_ranked_by_its_races(tmp_path: Path) -> None:
    speeds = {"one-rank": 0.8, "gradient_averaging": 1.0, "bmuf:period=16": 1.4}
    report = compared(tmp_path, {2: speeds, 4: {**speeds, "bmuf:period=16": 1.6}}, (1, 2, 3))
    assert report.answer[0] == (
        "Choose bmuf (period=16): on 2 and 4 ranks it is the fastest strategy that keeps the accuracy."
    )
    assert "times the speed of gradient averaging" in report.answer[1].replace("\u00a0", " ")
    assert "(1.7" in report.answer[1] and "times one rank" in report.answer[1]  # 1.4 / 0.8
    rows = list(csv.DictReader(io.StringIO(report.csv.read_text())))
    found = {(row["ranks"], row["strategy"]): row["raced_speed"] for row in rows}
    assert float(found["4", "bmuf:period=16"]) == pytest.approx(1.6, rel=0.02)
    page = report.html.read_text(encoding="utf-8").replace("\u00a0", " ")
    assert re.search(r"0\.80 \[[^]]+\] on 2; 0\.80 \[[^]]+\] on 4", page)  # one rank, in both races
    assert "raced speed" in page and "Race on 4 ranks" in page


def test_a_headline_is_no_stronger_than_what_it_rests_on(tmp_path: Path) -> None:
    """A stranger's: chosen by 2 rounds and one seed, and 0.1 nats/frame worse than one rank."""
    speeds = {"one-rank": 0.6, "gradient_averaging": 1.0, "bmuf:period=16": 1.1}
    report = compared(tmp_path, {2: speeds}, score=-0.5, ranks=(1, 2), rounds=2)
    headline, first = (sentence.replace("\u00a0", " ") for sentence in report.answer[:2])
    assert headline.startswith(
        "Bmuf (period=16) seems the best choice, judging by one seed and a race of 2 rounds: on 2 ranks it "
        "was the fastest strategy that is as accurate as any there. On 2 ranks it ends 0.1"
    )
    assert " nats/frame below one rank (WER " in headline and ", more than the rule allows." in headline
    assert headline.endswith("To know, repeat the command with --seeds 1,2,3 --race 24.")
    # All of one sentence is of the race, and none of the runs.
    assert "times the speed of gradient averaging in the race (1.8" in first and "frames/s" not in first
    row = next(line for line in on_terminal(report.table, 220).splitlines() if line.startswith("  one rank"))
    assert re.search(r" 0\.(59|60|61) ", row)  # it raced, too


def test_a_chosen_baseline_is_what_others_are_compared_with(tmp_path: Path) -> None:
    speeds = {"one-rank": 0.6, "gradient_averaging": 1.0, "bmuf:period=16": 0.9}
    report = compared(tmp_path, {2: speeds}, ranks=(1, 2))
    assert report.answer[1].startswith(
        "2 ranks: gradient averaging with the reference speed in the race (1.6"
    )


def test_one_rank_that_races_as_fast_is_enough(tmp_path: Path) -> None:
    speeds = {"one-rank": 1.3, "gradient_averaging": 1.0, "bmuf:period=16": 1.1}
    report = compared(tmp_path, {2: speeds, 4: {**speeds, "bmuf:period=16": 1.6}}, score=-0.39)
    assert "2 ranks seem to gain nothing: one rank alone keeps" in report.answer[0]


def test_strategies_that_race_alike_are_not_told_apart(tmp_path: Path) -> None:
    speeds = {"one-rank": 0.8, "gradient_averaging": 1.0, "bmuf:period=16": 1.002}
    report = compared(tmp_path, {2: speeds, 4: speeds}, noise=0.03)
    sentences = [s for s in report.answer if "cannot be told apart" in s]
    assert len(sentences) == 2 and "On 2 ranks" in sentences[0] and "On 4 ranks" in sentences[1]
    assert "on 2 and 4 ranks none that keeps the accuracy is known to be faster." in report.answer[0]


def test_one_rank_that_cannot_be_told_apart_is_said(tmp_path: Path) -> None:
    speeds = {"one-rank": 1.1, "gradient_averaging": 1.0, "bmuf:period=16": 1.101}
    answer = " ".join(
        compared(tmp_path, {2: speeds, 4: {**speeds, "bmuf:period=16": 1.6}}, noise=0.02).answer
    )
    assert answer.count("times one rank, from which the race cannot tell it apart and which reaches") == 1


def test_one_rank_is_not_called_as_fast_where_the_race_cannot_know(tmp_path: Path) -> None:
    """Where intervals held 1, the headline said that no strategy is faster."""
    speeds = {"one-rank": 1.07, "gradient_averaging": 1.0, "bmuf:period=16": 1.0}
    unsure = compared(tmp_path / "a", {2: speeds}, (1, 2, 3), -0.385, ranks=(1, 2), noise=0.15).answer[0]
    assert unsure == (
        "One rank alone keeps the accuracy, and no strategy on 2 ranks that does so is known to be faster: "
        "nothing shows that distributing this training gains time."
    )
    faster = {**speeds, "bmuf:period=16": 2.6}
    there = compared(tmp_path / "b", {2: speeds, 4: faster}, (1, 2, 3), -0.385, noise=0.15).answer[0]
    assert there.endswith(
        "Nothing shows a gain on 2 ranks: one rank alone keeps the accuracy, too, and no strategy there is "
        "known to be faster."
    )
    known = {**speeds, "one-rank": 1.5}
    sure = compared(tmp_path / "c", {2: known}, (1, 2, 3), -0.385, ranks=(1, 2)).answer[0]
    assert sure.endswith("that does so is faster: do not distribute this training.")


def test_the_csv_has_the_speed_of_one_rank_in_each_race(tmp_path: Path) -> None:
    """One rank races on every number of ranks: the terminal showed that, and the CSV nothing."""
    speeds = {"one-rank": 0.8, "gradient_averaging": 1.0, "bmuf:period=16": 1.4}
    report = compared(tmp_path, {2: speeds, 4: {**speeds, "one-rank": 0.5}})
    rows = list(csv.DictReader(io.StringIO(report.csv.read_text())))
    for ranks, expected in (("2", 0.8), ("4", 0.5)):
        of_ranks = [row for row in rows if row["ranks"] == ranks]
        assert len(of_ranks) == 2
        for row in of_ranks:
            low, ratio, high = (float(row[f"one_rank_raced_speed{end}"]) for end in ("_low", "", "_high"))
            assert low < ratio < high and ratio == pytest.approx(expected, rel=0.02)
    assert [row["one_rank_raced_speed"] for row in rows if row["ranks"] == "1"] == [""]


def test_a_race_that_failed_is_said(tmp_path: Path) -> None:
    out = write_comparison(
        tmp_path / "out", [MadeUpStrategy("a"), MadeUpStrategy("b")], (2,), (1,), ("frames",)
    )
    content = json.loads((out / "compare.json").read_text())
    (out / "compare.json").write_text(
        json.dumps({**content, "failed_races": {"2": "rank 1: the loss is nan"}})
    )
    answer = write_comparison_report(out).answer
    assert "The race on 2 ranks failed: rank 1: the loss is nan. The same command tries it again." in answer


def test_a_race_that_was_not_used_is_named(tmp_path: Path) -> None:
    out = write_sweep(tmp_path / "sweep", realistic_sweep())
    write_made_up_race(out, made_up_race(SPEEDS))
    settings = json.loads((out / "model_averaging-16" / "run.json").read_text())
    (out / "model_averaging-16" / "run.json").write_text(json.dumps({**settings, "size": 4}))
    answer = " ".join(write_report(out).answer)
    assert "The race on 2 ranks was not used, because the runs trained on 2 and 4:" in answer


def test_a_ratio_without_uncertainty_has_no_interval() -> None:
    assert times_text(1.0, (1.0, 1.0)) == "1.00" and times_text(1.0, (0.97, 1.04)) == "1.00 [0.97, 1.04]"
