"""Judge the clocks, the interfaces and the speed between hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from speechdp.doctor.finding import Finding, ok, some_of
from speechdp.doctor.links import slow_links, suspects
from speechdp.doctor.seen import Rank, by_host

_CLOCK_S = 1.0
#: A link of 100 Mbit/s transfers 12 MB/s, one of 1 Gbit/s 110.
_SLOW_BYTES_S = 50e6


def judge_clocks(ranks: Sequence[Rank]) -> list[Finding]:
    """Compare clocks with rank 0's."""
    hosts = by_host(ranks, "clock")
    if len(hosts) < 2:
        return []
    reference, *others = hosts
    offsets = {host: clock_offset(hosts[reference], hosts[host]) for host in others}
    wrong = {host: offset for host, offset in offsets.items() if abs(offset) > _CLOCK_S}
    if wrong:
        found = some_of(f"{host} {offset:+.1f} s against {reference}" for host, offset in wrong.items())
        remedy = "let chrony or ntpd set the clocks: timelines and file times of hosts are compared"
        return [Finding("clocks", "warn", found, tuple(wrong), remedy)]
    return [ok("clocks", f"within {max(map(abs, offsets.values())) * 1e3:.1f} ms of {reference}'s")]


def clock_offset(first: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return by how many seconds a clock is ahead of the first, from readings around barriers.

    No rank leaves a barrier before all have entered it, so one rank's reading before it is earlier than the
    other's reading after it: offset <= other's after - first's before, and >= other's before - first's after.
    The result is the middle between the narrowest bounds of all rounds.
    """
    rounds = range(len(first["before"]))
    upper = min(other["after"][i] - first["before"][i] for i in rounds)
    lower = max(other["before"][i] - first["after"][i] for i in rounds)
    return float(lower + upper) / 2


def judge_interfaces(ranks: Sequence[Rank], interface: str | None, *, job_hangs: bool) -> list[Finding]:
    """Check for addresses that several hosts share, and for the interface the user chose.

    Args:
        ranks: the ranks that reported.
        interface: the user's --interface; None: not given.
        job_hangs: whether ranks could not exchange anything: then shared addresses are the likely cause.
    """
    hosts = {host: node["interfaces"] for host, node in by_host(ranks, "node").items()}
    if not hosts:
        return []
    if interface is not None:
        without = tuple(host for host, theirs in hosts.items() if interface not in theirs)
        if without:
            remedy = f"choose one that all have: {some_of(_common(hosts)) or 'there is none'}"
            found = f"--interface {interface}: no interface of this name is up with an IPv4 address"
            return [Finding("interfaces", "fail", found, without, remedy)]
        return [
            ok("interfaces", f"{interface}: {some_of(theirs[interface][0] for theirs in hosts.values())}")
        ]
    shared = _shared_addresses(hosts)
    if shared:
        (name, address), owners = next(iter(shared.items()))
        good = [common for common in _common(hosts) if all(common != used for used, _ in shared)]
        choice = (
            f"--interface {good[0]}"
            if good
            else "--interface and the name of the one that connects the hosts"
        )
        found = f"{name} has address {address} on several hosts"
        remedy = (
            f"add {choice} to launch: ranks may mistake that address for another host's and wait for ever"
        )
        return [Finding("interfaces", "fail" if job_hangs else "warn", found, owners, remedy)]
    named = some_of(f"{host} {_shown(theirs)}" for host, theirs in hosts.items())
    return [ok("interfaces", named)]


def _shared_addresses(hosts: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str], tuple[str, ...]]:
    owners: dict[tuple[str, str], list[str]] = {}
    for host, theirs in hosts.items():
        for name, addresses in theirs.items():
            for address in addresses:
                owners.setdefault((name, address), []).append(host)
    return {key: tuple(names) for key, names in owners.items() if len(names) > 1}


def _common(hosts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return interfaces that all hosts have."""
    first, *others = hosts.values()
    return [name for name in first if all(name in theirs for theirs in others)]


def _shown(interfaces: Mapping[str, Any]) -> str:
    return " ".join(f"{name} {addresses[0]}" for name, addresses in interfaces.items()) or "none"


def judge_speed(ranks: Sequence[Rank]) -> list[Finding]:
    """Judge the links between neighbouring hosts, and report the speed of all hosts together."""
    findings = []
    pairs = pair_speeds(ranks)
    rates = {pair: float(facts["bus_bytes_s"]) for pair, facts in pairs.items()}
    slow, reference = slow_links(rates)
    crawling = {pair: rate for pair, rate in rates.items() if rate < _SLOW_BYTES_S}
    if slow:
        found = f"{_rates_text(slow)}, others {_rate(reference)}"
        remedy = "check that host's cable, port and negotiated rate (ethtool), and what else uses its network"
        findings.append(Finding("speed of links", "fail", found, suspects(slow), remedy))
    elif crawling:
        remedy = "check that --interface names the fast network, and check the negotiated rate (ethtool eth0)"
        findings.append(Finding("speed of links", "warn", _rates_text(crawling), suspects(crawling), remedy))
    elif rates:
        findings.append(ok("speed of links", _rates_text(rates)))
    for part, name in (("speed", "allreduce"), ("horovod", "allreduce by Horovod")):
        sums = [rank.facts[part] for rank in ranks if "bus_bytes_s" in rank.facts.get(part, {})]
        if sums:
            found = (
                f"all {len(ranks)} ranks: {sums[0]['latency_s'] * 1e6:.0f} us for 8 B, "
                f"bus {_rate(sums[0]['bus_bytes_s'])} with {sums[0]['bytes'] / (1 << 20):.0f} MiB"
            )
            findings.append(ok(name, found))
    return findings


def pair_speeds(ranks: Sequence[Rank]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Return the measurements for pairs of hosts."""
    host_of = {rank.rank: rank.host for rank in ranks}
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for rank in ranks:
        for part, facts in rank.facts.items():
            kind, _, pair = part.partition(" ")
            if kind == "pair" and "bus_bytes_s" in facts:
                a, b = (int(number) for number in pair.split())
                found[host_of.get(a, f"rank {a}"), host_of.get(b, f"rank {b}")] = facts
    return found


def _rates_text(rates: Mapping[tuple[str, str], float]) -> str:
    return some_of(f"{a}-{b} {_rate(rate)}" for (a, b), rate in rates.items())


def _rate(bytes_s: float) -> str:
    return f"{bytes_s / 1e6:.0f} MB/s" if bytes_s < 1e9 else f"{bytes_s / 1e9:.1f} GB/s"
