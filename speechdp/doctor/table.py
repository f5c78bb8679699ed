"""Print findings: a table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from speechdp.doctor.finding import Finding, some_of

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_MOST_HOSTS = 6


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print each finding with its remedy, and a line with the number of failed checks or warnings."""
    if console.is_terminal:
        console.print(_table(findings))
    else:
        for finding in findings:
            # As text, not markup: host names and messages come from elsewhere.
            console.print(Text(_shown(_line(finding))), soft_wrap=True)
    console.print(Text(_sum(findings)), soft_wrap=True)


def _table(findings: Sequence[Finding]) -> Table:
    table = Table()
    table.add_column("")
    table.add_column("check")
    table.add_column("hosts")
    table.add_column("found", overflow="fold")
    for finding in findings:
        style = _STYLES[finding.status]
        found = Text(_shown(finding.found))
        if finding.remedy:
            found.append(f"\n{_shown(finding.remedy)}", style=style)
        hosts = _shown(some_of(finding.hosts, _MOST_HOSTS)) or "all"
        table.add_row(Text(finding.status, style=style), Text(finding.check), Text(hosts), found)
    return table


def _line(finding: Finding) -> str:
    hosts = f"{some_of(finding.hosts, _MOST_HOSTS)}: " if finding.hosts else ""
    remedy = f"; remedy: {finding.remedy}" if finding.remedy else ""
    return f"{finding.status:<4}  {finding.check:<20} {hosts}{finding.found}{remedy}"


def _shown(text: str) -> str:
    """Return text without terminal control characters, as hosts and logins may print anything."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _sum(findings: Sequence[Finding]) -> str:
    num_failed = sum(finding.status == "fail" for finding in findings)
    num_warned = sum(finding.status == "warn" for finding in findings)
    if num_failed:
        return f"{num_failed} of {len(findings)} checks failed: a job would fail or run very slowly"
    if num_warned:
        return f"no check failed, {num_warned} of {len(findings)} gave a warning"
    return f"all {len(findings)} checks passed"
