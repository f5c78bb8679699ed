"""Findings: the results of the doctor's checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table.

    Attributes:
        check: what was checked.
        status: "fail" if a job would fail or crawl, "warn" if it may.
        found: what was found.
        hosts: the hosts that it concerns; (): all.
        remedy: what to do about it; "" only if `status` is "ok".
    """

    check: str
    status: Status
    found: str
    hosts: tuple[str, ...] = ()
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.remedy or self.status == "ok", self

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON."""
        return asdict(self)


def ok(check: str, found: str) -> Finding:
    """Return a finding that nothing is wrong."""
    return Finding(check, "ok", found)


def hosts_by_value(values: Mapping[str, object]) -> str:
    """Return a text on which hosts have which value: "4.1.8 (n1, n2), 4.1.4 (n3)".

    Args:
        values: value of each host.
    """
    return ", ".join(f"{value or 'none'} ({some_of(hosts)})" for value, hosts in grouped(values).items())


def grouped(values: Mapping[str, object]) -> dict[str, tuple[str, ...]]:
    """Return the hosts of each value, as text."""
    hosts_of: dict[str, tuple[str, ...]] = {}
    for host, value in values.items():
        hosts_of[str(value)] = (*hosts_of.get(str(value), ()), host)
    return hosts_of


def minority(values: Mapping[str, object]) -> tuple[str, ...]:
    """Return the hosts whose value is not the most common one."""
    hosts_of = grouped(values)
    commonest = max(hosts_of, key=lambda value: len(hosts_of[value]))  # the first of equals
    return tuple(host for host, value in values.items() if str(value) != commonest)


def some_of(names: Iterable[object], most: int = 4) -> str:
    """Join names, at most `most` of them."""
    known = [str(name) for name in names]
    return ", ".join(known[:most]) + (f" and {len(known) - most} more" if len(known) > most else "")
