"""How findings are shown: lines that can be searched, or a table on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from speechdp.doctor.finding import Finding, hosts_by_value, ok, some_of
from speechdp.doctor.table import print_findings

FINDINGS = [
    ok("job", "2 ranks met"),
    Finding("login", "warn", "prints [bold]\x1b[2J[/bold]", ("n1",), "mend ~/.bashrc"),
    Finding("reachable", "fail", "x" * 300, tuple(f"n{i}" for i in range(9)), "ssh-copy-id"),
]


def shown(findings: list[Finding], *, terminal: bool) -> str:
    out = io.StringIO()
    print_findings(Console(file=out, force_terminal=terminal, width=100, color_system=None), findings)
    return out.getvalue()


def test_without_a_terminal_there_is_a_line_a_finding() -> None:
    job, login, reachable, end = shown(FINDINGS, terminal=False).splitlines()
    assert job == "ok    job                  2 ranks met"
    assert login == "warn  login                n1: prints [bold]?[2J[/bold]; remedy: mend ~/.bashrc"
    assert reachable.startswith("fail  reachable            n0, n1, n2, n3, n4, n5 and 3 more: xxx")
    assert reachable.endswith("x; remedy: ssh-copy-id")
    assert end == "1 of 3 checks failed: a job would fail or run very slowly"


def test_on_a_terminal_there_is_a_table() -> None:
    text = shown(FINDINGS, terminal=True)
    assert "[bold]?[2J[/bold]" in text
    assert text.count("x") == 300
    assert "mend ~/.bashrc" in text


@pytest.mark.parametrize(
    ("count", "end"), [(1, "all 1 checks passed"), (2, "no check failed, 1 of 2 gave a warning")]
)
def test_the_last_line_says_how_it_stands(count: int, end: str) -> None:
    assert shown(FINDINGS[:count], terminal=False).splitlines()[-1] == end


def test_a_finding_that_is_not_well_has_a_remedy() -> None:
    with pytest.raises(AssertionError):
        Finding("job", "fail", "broken")


def test_values_are_told_with_their_hosts() -> None:
    assert hosts_by_value({"a": 1, "b": 2, "c": 1, "d": ""}) == "1 (a, c), 2 (b), none (d)"
    assert some_of("abcdef") == "a, b, c, d and 2 more"
