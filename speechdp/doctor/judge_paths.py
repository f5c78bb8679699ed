"""Judge folders that all hosts must see: the data, and where a run is written."""

from __future__ import annotations

from collections.abc import Sequence

from speechdp.counting import counted
from speechdp.doctor.finding import Finding, grouped, hosts_by_value, minority, ok, some_of
from speechdp.doctor.seen import Rank, by_host

_FULL_BYTES = 100 << 20
_NEARLY_FULL_BYTES = 1 << 30


def judge_data(ranks: Sequence[Rank], data: str) -> list[Finding]:
    """Check that every host has the same complete data directory."""
    hosts = by_host(ranks, "data")
    if not hosts:
        return []
    findings = []
    for error, owners in grouped({host: f.get("error", "") for host, f in hosts.items()}).items():
        if error:
            findings.append(
                Finding("data", "fail", error, owners, "give a path all hosts see, or copy the data")
            )
    good = {host: facts for host, facts in hosts.items() if "error" not in facts}
    for host, facts in good.items():
        if facts["missing"]:
            found = f"shards that data.json lists are missing: {some_of(facts['missing'])}"
            remedy = f"copy {data} to that host again, or share it"
            findings.append(Finding("data", "fail", found, (host,), remedy))
    checksums = {host: str(facts["checksum"])[:12] for host, facts in good.items()}
    if len(set(checksums.values())) > 1:
        found = f"data.json differs: {hosts_by_value(checksums)}"
        remedy = "prepare the data once and copy or share that folder"
        findings.append(Finding("data", "fail", found, minority(checksums), remedy))
    if not findings:
        facts = next(iter(good.values()))
        depth = "every checksum matches" if facts["verified"] else "data.json the same everywhere"
        findings.append(ok("data", f"{data}: {counted(facts['shards'], 'shard')}, {depth}"))
    return findings


def judge_folder(ranks: Sequence[Rank], folder: str) -> list[Finding]:
    """Check that all hosts share the folder and may write to it, and that its disk has room."""
    by_rank = {rank.rank: rank for rank in ranks if "folder" in rank.facts}
    if not by_rank:
        return []
    findings = []
    facts_of = by_host(ranks, "folder")
    remedies = {str(facts["error"]): str(facts["remedy"]) for facts in facts_of.values()}
    for error, owners in grouped({host: facts["error"] for host, facts in facts_of.items()}).items():
        if error:
            remedy = f"make {folder} on storage that every host mounts and you may write to"
            if remedies[error]:
                remedy = f"{remedies[error]}, or choose another folder"
            findings.append(
                Finding("run folder", "fail", f"{folder} cannot be written: {error}", owners, remedy)
            )
    apart = {rank.host for rank in by_rank.values() if 0 in rank.facts["folder"]["unseen"]}
    unseen = by_rank[0].facts["folder"]["unseen"] if 0 in by_rank else []
    apart |= {by_rank[number].host for number in unseen if number in by_rank}
    if apart:
        first = by_rank[0].host if 0 in by_rank else "rank 0"
        found = f"{folder} there is not the {folder} of {first}"
        remedy = "give a run folder on storage that every host mounts (NFS, Lustre), not a local disk or /tmp"
        findings.append(Finding("run folder", "fail", found, tuple(sorted(apart)), remedy))
    free = {host: int(facts["free_bytes"]) for host, facts in facts_of.items()}
    free = {host: count for host, count in free.items() if count >= 0}
    if free and min(free.values()) < _NEARLY_FULL_BYTES:
        least = min(free.values())
        scarce = tuple(host for host, count in free.items() if count < _NEARLY_FULL_BYTES)
        found = f"{least / (1 << 20):.0f} MiB are free in {folder}"
        remedy = (
            "free some space, or choose another disk: the old checkpoint stays until the new one is complete"
        )
        findings.append(Finding("disk", "fail" if least < _FULL_BYTES else "warn", found, scarce, remedy))
    if not findings:
        room = f", {min(free.values()) / (1 << 30):.1f} GiB free" if free else ""
        findings.append(ok("run folder", f"{folder} is shared by all{room}"))
    return findings
