"""Judge whether hosts can be reached, and whether the probe's job completed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from speechdp.counting import counted
from speechdp.doctor.finding import Finding, ok, some_of
from speechdp.doctor.job import JobRecord
from speechdp.doctor.reach import Reach


@dataclass(frozen=True)
class _Trouble:
    """A message of ssh or of a launcher, its meaning, and the remedy, in which {host} is the host's name."""

    text: re.Pattern[str]
    meaning: str
    remedy: str


_SSH = (
    _Trouble(
        re.compile(r"REMOTE HOST IDENTIFICATION HAS CHANGED"),
        "its host key is not the one known here",
        "if the host was installed anew: ssh-keygen -R {host}, then "
        "ssh-keyscan -H {host} >> ~/.ssh/known_hosts",
    ),
    _Trouble(
        re.compile(r"Host key verification failed|host key is known"),
        "its host key is not known here",
        "ssh-keyscan -H {host} >> ~/.ssh/known_hosts (compare the fingerprint with the host's own)",
    ),
    _Trouble(
        re.compile(r"Permission denied|Too many authentication failures"),
        "it refuses the login",
        "ssh-copy-id {host} (after ssh-keygen -t ed25519 if you have no key; one with a passphrase needs "
        "ssh-agent)",
    ),
    _Trouble(
        re.compile(r"Could not resolve hostname|Name or service not known"),
        "its name is not resolved",
        "correct the name in the hostfile, or add the host to DNS or /etc/hosts",
    ),
    _Trouble(
        re.compile(r"Connection refused"),
        "nothing listens for ssh there",
        "start sshd on {host}, or give its port in ~/.ssh/config",
    ),
    _Trouble(
        re.compile(r"[Cc]onnection timed out|No route to host|Network is unreachable"),
        "it does not answer",
        "check that {host} is up and its network works (ping {host}); a firewall must let port 22 through",
    ),
)
_JOB = (
    _Trouble(
        re.compile(r"No module named '?speechdp"),
        "speechdp, or this version of it, is not installed there",
        "install the same speechdp on every host (launch/setup), or share its folder",
    ),
    _Trouble(
        re.compile(r"(?:orted|prted)\b.*(?:not found|No such file)"),
        "Open MPI's daemon is not there",
        "install Open MPI at the same path on every host, or share the folder of the environment",
    ),
    _Trouble(
        re.compile(r"networks? specified to be included|[Nn]o network interfaces were found"),
        "some or all hosts lack the network that was named",
        "give --interface a name that is up on every host (ip -brief address)",
    ),
    _Trouble(
        re.compile(r"not enough slots"),
        "the hosts have fewer slots than ranks",
        "raise slots= in the hostfile, or lower -np",
    ),
    _Trouble(
        re.compile(r"Host key verification failed|Permission denied \(\w"),
        "ssh from host to host fails",
        "every host must reach every other without a prompt: ssh from the first to the others by hand",
    ),
)


def judge_reach(reach: Reach) -> list[Finding]:
    """Judge one host as seen from here."""
    hosts = (reach.host,)
    findings: list[Finding] = []
    if not reach.tried:
        if not reach.address:
            remedy = "add the host to DNS or /etc/hosts"
            findings.append(Finding("reachable", "warn", "its name is not resolved here", hosts, remedy))
        return findings
    if reach.exit_code is None:
        remedy = f"ssh {reach.host} true must return at once: check that host's load and its login scripts"
        return [Finding("reachable", "fail", "the login did not end in time", hosts, remedy)]
    if reach.exit_code != 0:
        return [_refused(reach)]
    if reach.missing:
        found = f"{some_of(reach.missing)} cannot be run there"
        remedy = "install speechdp at the same path on every host, or share the folder of the environment"
        findings.append(Finding("programs", "fail", found, hosts, remedy))
    if reach.greeting:
        found = f"prints text at login: {reach.greeting.splitlines()[0][:60]!r}"
        remedy = "begin ~/.bashrc there with: [ -t 1 ] || return (the text breaks scp, and maybe launchers)"
        findings.append(Finding("login", "warn", found, hosts, remedy))
    if not reach.is_local and reach.address.startswith("127."):
        found = f"its name resolves to {reach.address} on this machine"
        remedy = f"give {reach.host} its own address in /etc/hosts: other hosts would connect to themselves"
        findings.append(Finding("reachable", "warn", found, hosts, remedy))
    return findings


def _refused(reach: Reach) -> Finding:
    for trouble in _SSH:
        if trouble.text.search(reach.output):
            remedy = trouble.remedy.format(host=reach.host)
            return Finding("reachable", "fail", trouble.meaning, (reach.host,), remedy)
    output = reach.output.splitlines()[-1] if reach.output else f"exit code {reach.exit_code}"
    remedy = f"make `ssh {reach.host} true` work without a prompt"
    return Finding("reachable", "fail", f"the login fails ({output})", (reach.host,), remedy)


def judge_job(job: JobRecord, placed: Sequence[str]) -> Finding:
    """Judge whether every rank started and completed all parts of the probe.

    Args:
        placed: host of each rank.
    """
    hosts = dict.fromkeys(placed)
    open_ranks = [rank for rank, record in sorted(job.ranks.items()) if record.open_part]
    silent = [rank for rank in range(job.num_ranks) if rank not in job.ranks]
    if job.exit_code == 0 and not open_ranks and not silent:
        return ok("job", f"{counted(job.num_ranks, 'rank')} on {some_of(hosts)} met and ended")
    known = _known_trouble(job, _names(silent, placed))
    if known is not None:
        return known
    if "killed by" in job.cause or "was lost" in job.cause:
        found = f"{job.cause}{_where(job, open_ranks, placed)}"
        return Finding("job", "fail", found, (), "check that host's own log (dmesg, journalctl)")
    return _own_words(job) or _missing(job, silent, open_ranks, placed)


def _own_words(job: JobRecord) -> Finding | None:
    for line in job.output:
        _, is_own, words = line.partition("speechdp: rank ")
        if is_own:
            return Finding("job", "fail", f"rank {words}", (), "fix what the rank names")
    return None


def _missing(
    job: JobRecord, silent: Sequence[int], open_ranks: Sequence[int], placed: Sequence[str]
) -> Finding:
    """Name the ranks that were missing when a job ended, or was ended, without a message."""
    if silent:
        remedy = (
            "start one by hand with the command that speechdp launch --dry-run shows; a firewall must let "
            "hosts connect to the first one; give --interface if hosts have several networks"
        )
        found = f"no rank came up there{_last_words(job)}"
        return Finding("job", "fail", found, _names(silent, placed), remedy)
    if open_ranks:
        return _hang(job, open_ranks, placed)
    remedy = "run it again; if it persists, start the ranks by hand as speechdp launch --dry-run shows"
    found = f"the launcher ended with exit code {job.exit_code}{_last_words(job)}"
    return Finding("job", "fail", found, (), remedy)


def _hang(job: JobRecord, open_ranks: Sequence[int], placed: Sequence[str]) -> Finding:
    """Name the ranks that did not reach the part in which others wait, or say that all wait."""
    furthest = max(len(record.begun) for record in job.ranks.values())
    part = next(r.begun[-1] for r in job.ranks.values() if len(r.begun) == furthest)
    late = [rank for rank, record in sorted(job.ranks.items()) if len(record.begun) < furthest]
    if late:
        inside = job.ranks[late[0]].open_part or "between two parts"
        found = f"the others wait in part `{part}`, but this host is still in `{inside}`"
        remedy = "check that host's load, disks (df, mount) and network"
        return Finding("job", "fail", found, _names(late, placed), remedy)
    found = f"no exchange between ranks in part `{part}`"
    remedy = (
        "name the network that connects the hosts: --interface (the same address on several hosts, as "
        "docker0 has, or a firewall between them, stops every exchange)"
    )
    return Finding("job", "fail", found, _names(open_ranks, placed), remedy)


def _known_trouble(job: JobRecord, silent: tuple[str, ...]) -> Finding | None:
    """Return the meaning of a launcher's message, for the hosts that did not report."""
    for trouble in _JOB:
        line = next((line for line in job.output if trouble.text.search(line)), None)
        if line is not None:
            return Finding("job", "fail", f"{trouble.meaning} ({line[:160]})", silent, trouble.remedy)
    return None


def _where(job: JobRecord, open_ranks: Sequence[int], placed: Sequence[str]) -> str:
    if not open_ranks:
        return ""
    rank = open_ranks[-1]
    return f", while {some_of(_names([rank], placed))} was in part `{job.ranks[rank].open_part}`"


def _last_words(job: JobRecord) -> str:
    telling = [line for line in (job.cause, *job.output) if any(c.isalpha() for c in line)]
    return f" ({telling[0][:160]})" if telling else ""


def _names(ranks: Sequence[int], placed: Sequence[str]) -> tuple[str, ...]:
    names = [placed[rank] if rank < len(placed) else f"rank {rank}" for rank in ranks]
    return tuple(dict.fromkeys(names))
