"""Reports of ranks, through launchers that add words and tear lines."""

from __future__ import annotations

import random

from speechdp.doctor.wire import Report, ReportListener, to_lines

LONG = Report(3, "node", is_end=True, limit_s=1.5, facts={"text": "ä@\n\x00" * 500, "numbers": [1, 2.5]})


def test_a_report_comes_home_whatever_stands_around_its_lines() -> None:
    listener = ReportListener()
    lines = [f"[1,{3}]<stdout>: {line.rstrip()}\r\n" for line in to_lines(LONG, 3, 0)]
    assert len(lines) > 2
    heard = [listener.read(line) for line in lines]
    assert heard[:-1] == [None] * (len(lines) - 1)
    assert heard[-1] == LONG


def test_lines_of_several_ranks_may_mix() -> None:
    reports = [Report(rank, "node", is_end=True, facts={"text": str(rank) * 2000}) for rank in range(4)]
    lines = [line for report in reports for line in to_lines(report, report.rank, 0)]
    random.Random(1).shuffle(lines)
    listener = ReportListener()
    heard = [report for line in lines if (report := listener.read(line)) is not None]
    assert sorted(heard, key=lambda report: report.rank) == reports


def test_a_torn_line_is_left_out_and_the_next_report_is_heard() -> None:
    listener = ReportListener()
    lines = to_lines(LONG, 0, 0)
    lines[1] = lines[1].replace("u00e4", "u00e5", 1)
    assert [listener.read(line) for line in lines] == [None] * len(lines)
    assert [listener.read(line) for line in to_lines(LONG, 0, 1)][-1] == LONG


def test_what_is_no_report_is_none() -> None:
    for line in ("", "hello", "@speechdp-doctor 0 0 0/1 00000000 []@"):
        assert ReportListener().read(line) is None
