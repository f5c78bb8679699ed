"""What batch systems leave in the environment of a job, as their manuals and real jobs have it."""

from __future__ import annotations

import contextlib
import re
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speechdp.cli import launch
from speechdp.cli.main import run
from speechdp.errors import ConfigError
from speechdp.launching import allocation
from speechdp.launching.allocation import find_allocation
from speechdp.launching.hostfile import Host, is_host_name
from speechdp.launching.hostlist import MAX_HOSTS, HostListError, expand_host_list, expand_task_counts

#: Of `sbatch -N 3 -n 5 --ntasks-per-node=2` under Slurm 22.05.
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOBID": "4711",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_NODELIST": "n[1-3]",
    "SLURM_NNODES": "3",
    "SLURM_NTASKS": "5",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_CPUS_PER_NODE": "2(x3)",
}
#: Of `qsub -pe orte 5` under Grid Engine 8.1.9.
SGE = {
    "JOB_ID": "12",
    "SGE_TASK_ID": "undefined",
    "NSLOTS": "5",
    "NHOSTS": "3",
    "PE": "orte",
    "RESTARTED": "0",
}


def hosts(environ: dict[str, str]) -> list[tuple[str, int]]:
    allocation = find_allocation(environ)
    assert allocation is not None
    return [(host.name, host.slots) for host in allocation.hostfile.hosts]


def write(folder: Path, text: str) -> str:
    path = folder / "nodes"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[01-03,7],gpu-a[1-2]-ib", ["n01", "n02", "n03", "n7", "gpu-a1-ib", "gpu-a2-ib"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("rack[1-2]n[1,3]", ["rack1n1", "rack1n3", "rack2n1", "rack2n3"]),
        ("a.b.org,c", ["a.b.org", "c"]),
    ],
)
def test_slurm_host_lists(text: str, names: list[str]) -> None:
    assert expand_host_list(text) == names


@pytest.mark.parametrize(
    "text",
    [
        "",
        "n1,",
        "n[1",
        "n1]",
        "n[[1]]",
        "n[]",
        "n[3-1]",
        "n[a-b]",
        "n[1-]",
        "n[1-2-3]",
        "n[1-999999999]",
        "n[²]",
    ],
)
def test_bad_host_lists_are_refused(text: str) -> None:
    with pytest.raises(HostListError):
        expand_host_list(text)


def test_many_small_ranges_do_not_fill_the_memory() -> None:
    with pytest.raises(HostListError, match=str(MAX_HOSTS)):
        expand_host_list("n[1-999][1-999][1-999]")
    with pytest.raises(HostListError, match=str(MAX_HOSTS)):
        expand_task_counts(",".join(["1(x99999)"] * 3))


@given(st.text(alphabet="n01-9[],x()²\n ", max_size=30))
def test_any_list_is_expanded_or_refused(text: str) -> None:
    for expand in (expand_host_list, expand_task_counts):
        with contextlib.suppress(HostListError):
            assert len(expand(text)) >= 1


@given(st.lists(st.integers(min_value=1, max_value=99), min_size=1, max_size=20))
def test_counts_written_by_slurm_are_read_back(counts: list[int]) -> None:
    text, index = [], 0
    while index < len(counts):
        times = 1
        while index + times < len(counts) and counts[index + times] == counts[index]:
            times += 1
        text.append(f"{counts[index]}(x{times})" if times > 1 else str(counts[index]))
        index += times
    assert expand_task_counts(",".join(text)) == counts


def test_slurm() -> None:
    allocation = find_allocation(SLURM)
    assert allocation is not None
    assert (allocation.scheduler, allocation.job_id, allocation.restarts) == ("slurm", "4711", 0)
    assert allocation.hostfile.hosts == (Host("n1", 2), Host("n2", 2), Host("n3", 1))
    assert allocation.hostfile.source == "SLURM_JOB_NODELIST"
    with pytest.raises(ConfigError, match=r"^SLURM_JOB_NODELIST: 6 ranks wanted, but it has only 5 slots"):
        allocation.hostfile.allocate(6)
    assert allocation.cores == {"n1": 2, "n2": 2, "n3": 2}
    again = find_allocation({**SLURM, "SLURM_RESTART_COUNT": "2", "SLURM_JOB_CPUS_PER_NODE": ""})
    assert again is not None and again.restarts == 2 and again.cores == {}


def test_a_heterogeneous_job_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"SLURM_HET_SIZE=2: .*heterogeneous job .*submit a job of one part"
    ):
        find_allocation({**SLURM, "SLURM_HET_SIZE": "2"})
    assert find_allocation({**SLURM, "SLURM_HET_SIZE": "1"}) is not None


def test_slurm_without_tasks_per_node() -> None:
    environ = {name: value for name, value in SLURM.items() if name != "SLURM_TASKS_PER_NODE"}
    assert hosts(environ) == [("n1", 2), ("n2", 2), ("n3", 2)]
    del environ["SLURM_NTASKS_PER_NODE"]
    assert hosts(environ) == [("n1", 1), ("n2", 1), ("n3", 1)]


def test_lsf_prefers_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "hostA\nhostA\nhostB\nhostA\n")
    environ = {
        "LSB_JOBID": "77",
        "LSB_DJOB_HOSTFILE": file,
        "LSB_MCPU_HOSTS": "hostA 4 hostB 4",
        "LSB_HOSTS": "hostA hostB",
        "LSB_DJOB_NUMPROC": "4",
    }
    assert hosts(environ) == [("hostA", 3), ("hostB", 1)]
    del environ["LSB_DJOB_HOSTFILE"]
    assert hosts(environ) == [("hostA", 4), ("hostB", 4)]
    del environ["LSB_MCPU_HOSTS"]
    assert hosts(environ) == [("hostA", 1), ("hostB", 1)]
    allocation = find_allocation({**environ, "LSB_RESTART": "Y"})
    assert allocation is not None
    assert (allocation.scheduler, allocation.job_id, allocation.restarts) == ("lsf", "77", 1)


@pytest.mark.parametrize(
    ("text", "csm", "wanted"),
    [
        ("batch2 1 a01n01 42 a01n02 42", False, [("a01n01", 42), ("a01n02", 42)]),
        ("x7 1 a01n01 42", True, [("a01n01", 42)]),
        ("a 1 b 4", False, [("a", 1), ("b", 4)]),
        ("batch2 4 b 4", False, [("batch2", 4), ("b", 4)]),
        ("batch2 1", True, [("batch2", 1)]),
    ],
)
def test_the_node_of_the_batch_script_is_left_out(
    text: str, csm: bool, wanted: list[tuple[str, int]]
) -> None:
    environ = {"LSB_JOBID": "77", "LSB_MCPU_HOSTS": text}
    assert hosts({**environ, "CSM_ALLOCATION_ID": "5"} if csm else environ) == wanted


def test_pbs_counts_lines(tmp_path: Path) -> None:
    file = write(tmp_path, "node1.cluster\nnode2.cluster\nnode1.cluster\n\nnode2.cluster\n")
    environ = {"PBS_JOBID": "123.server", "PBS_NODEFILE": file, "PBS_ENVIRONMENT": "PBS_BATCH"}
    allocation = find_allocation(environ)
    assert allocation is not None
    assert allocation.hostfile.hosts == (Host("node1.cluster", 2), Host("node2.cluster", 2))
    assert (allocation.scheduler, allocation.job_id) == ("pbs", "123.server")
    assert allocation.hostfile.source == f"PBS_NODEFILE={file}"


def test_grid_engine(tmp_path: Path) -> None:
    file = write(
        tmp_path, "n1 2 all.q@n1 UNDEFINED\nn2 2 all.q@n2 <NULL>\nn3 1 all.q@n3 0,0\nn3 1 big.q@n3 x\n"
    )
    allocation = find_allocation({**SGE, "PE_HOSTFILE": file})
    assert allocation is not None
    assert allocation.hostfile.hosts == (Host("n1", 2), Host("n2", 2), Host("n3", 2))
    assert (allocation.scheduler, allocation.job_id, allocation.restarts) == ("sge", "12", 0)
    again = find_allocation({**SGE, "PE_HOSTFILE": file, "SGE_TASK_ID": "3", "RESTARTED": "1"})
    assert again is not None and (again.job_id, again.restarts) == ("12.3", 1)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"JOB_ID": "12"},
        {"PE_HOSTFILE": "/nowhere"},
        {"LSB_JOBID": "3"},
        {"LSB_HOSTS": "a b"},
        {"PBS_NODEFILE": "/nowhere"},
        {"PBS_JOBID": "3"},
        {"SLURM_JOB_NODELIST": "n1"},
        {"SLURM_JOB_ID": "3"},
        {**SGE},
        {"SLURM_JOB_ID": "", "SLURM_JOB_NODELIST": "n1"},
    ],
)
def test_one_variable_is_no_allocation(environ: dict[str, str]) -> None:
    assert find_allocation(environ) is None


@pytest.mark.parametrize(
    "variables",
    [
        {"OMPI_COMM_WORLD_SIZE": "4"},
        {"HOROVOD_SIZE": "2"},
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0"},
    ],
)
def test_a_rank_is_no_allocation(variables: dict[str, str]) -> None:
    assert find_allocation({**SLURM, **variables}) is None


def test_only_the_shell_of_salloc_is_one_to_launch_from() -> None:
    # salloc's interactive step has one task.
    interactive = {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PTY_PORT": "34889"}
    assert find_allocation(interactive) is not None
    with pytest.raises(ConfigError, match=r"a shell of srun --pty, .* in the shell that salloc opens"):
        find_allocation({**interactive, "SLURM_STEP_NUM_TASKS": "5"})
    assert find_allocation({**interactive, "SLURM_STEP_NUM_TASKS": "5", "OMPI_COMM_WORLD_SIZE": "5"}) is None
    # On one node ranks are started without Slurm: -np N.
    one_node = {**interactive, "SLURM_STEP_NUM_TASKS": "5", "SLURM_JOB_NUM_NODES": "1"}
    assert find_allocation(one_node) is None


@pytest.mark.parametrize("cores", ["4(x2)", "many"])
def test_cores_that_do_not_fit_the_hosts_are_not_told(cores: str) -> None:
    found = find_allocation({**SLURM, "SLURM_JOB_CPUS_PER_NODE": cores})
    assert found is not None and found.cores == {}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"SLURM_JOB_NODELIST": "n[1-3"}, "SLURM_JOB_NODELIST='n[1-3': .*a bracket is not closed"),
        ({"SLURM_JOB_NODELIST": "-oProxyCommand=id,a,b"}, "'-oProxyCommand=id' is not a host name"),
        ({"SLURM_JOB_NODELIST": "$(id),a,b"}, "is not a host name"),
        ({"SLURM_JOB_NODELIST": "a,A,b"}, "'a' and 'A' are one host"),
        ({"SLURM_TASKS_PER_NODE": "2(x3"}, "SLURM_TASKS_PER_NODE="),
        ({"SLURM_TASKS_PER_NODE": "2(x2)"}, "is for 2 nodes, SLURM_JOB_NODELIST for 3; .*batch script"),
        ({"SLURM_JOB_ID": "--all"}, "SLURM_JOB_ID='--all'"),
    ],
)
def test_what_slurm_cannot_have_written(changed: dict[str, str], said: str) -> None:
    with pytest.raises(
        ConfigError, match=said.replace("[", r"\[").replace("(x", r"\(x").replace("$(", r"\$\(")
    ):
        find_allocation({**SLURM, **changed})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node1\nnode 2\n", "line 2: .*'node 2' is not a host name"),
        ("node1\n`id`\n", "line 2: .*is not a host name"),
        ("\n\n", "no hosts in it"),
        ("n\xe4\n", "line 1: .*is not a host name"),
    ],
)
def test_a_bad_node_file_is_shown(tmp_path: Path, text: str, said: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError, match=rf"^PBS_NODEFILE={file}.*{said}.*--hostfile FILE"):
        find_allocation({"PBS_JOBID": "1", "PBS_NODEFILE": file})


def test_a_missing_node_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"PBS_NODEFILE=/nowhere/f: .*No such file.*--hostfile"):
        find_allocation({"PBS_JOBID": "1", "PBS_NODEFILE": "/nowhere/f"})
    with pytest.raises(ConfigError, match=r"LSB_MCPU_HOSTS='a 4 b': .*not pairs"):
        find_allocation({"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "a 4 b"})
    with pytest.raises(ConfigError, match="'four' in 'a four' is not a number of slots"):
        find_allocation({"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "a four"})


_MANY = "where the batch job has only 1 slot, the most that mpirun starts; ask Slurm for more tasks"
_OUTSIDE = "elsewhere is not one of the hosts of Slurm job 7 (n1, n2), and mpirun starts ranks on these only"
_FEW_CORES = (
    "3 ranks of 1 core on n1, where the batch job has only 2 cores, the most that srun uses; ask Slurm"
)
_SRUN = ("--launcher", "srun")


@pytest.mark.parametrize(
    ("lines", "options", "said"),
    [
        ("n1 slots=2\nn2 slots=1\n", (), _MANY),
        ("N2 slots=2\n", (), _MANY),
        ("n1 slots=1\n", (), ""),
        ("n1 slots=2\n", ("-np", "1"), ""),
        ("n1 slots=1\nelsewhere slots=1\n", (), _OUTSIDE),
        ("elsewhere slots=1\n", _SRUN, _OUTSIDE.replace("mpirun", "srun")),
        ("n1 slots=1\nelsewhere slots=1\n", ("-np", "1"), ""),
        ("n1.some.domain slots=1\n", (), ""),  # perhaps another name of the host: mpirun knows
        ("10.0.0.1 slots=1\n", (), ""),
        ("n1 slots=2\n", ("--mpi-args=--oversubscribe",), ""),
        ("n1 slots=2\n", _SRUN, ""),  # which counts cores, not tasks
        ("n1 slots=3\n", _SRUN, _FEW_CORES),
        ("elsewhere slots=3\n", ("--launcher", "horovodrun", "--controller", "gloo"), ""),
    ],
)
def test_hosts_that_slurm_has_not_given_the_job_are_refused(
    lines: str,
    options: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"}
    for name, value in {**job, "SLURM_JOB_CPUS_PER_NODE": "2(x2)"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "find_horovodrun", lambda *_: Path("/v/bin/horovodrun"))  # Horovod or not
    file = write(tmp_path, lines)
    words = ["launch", "--dry-run", "--hostfile", file, *options, "--", "train", "D", "R"]
    code, told = run(words), capsys.readouterr().err
    assert (code, told.startswith(f"speechdp: {file}: ")) == ((1, True) if said else (0, False)), told
    assert said in told


#: By name; that of this machine is the second, as Debian writes it.
_ADDRESSES = {"n1": ["10.0.0.1", "10.1.0.1"], "n2": ["127.0.1.1"], "n3": ["10.0.0.3"]}


@pytest.mark.parametrize(
    ("nodes", "lines", "shown"),
    [
        ("n[1-3]", "10.1.0.1 slots=1\n10.0.0.2 slots=2\nn3 slots=1\n", "n1:1,n2:2,n3:1"),
        ("n[1-3]", "10.9.9.9 slots=1\n", "10.9.9.9:1"),  # an address of n2 that is not known here, maybe
        ("n[1,3]", "10.9.9.9 slots=1\n", "10.9.9.9 is not one of the hosts of Slurm job 7 (n1, n3)"),
        ("n[1-3]", "N1 slots=1\n10.0.0.1 slots=1\n", "N1 and 10.0.0.1 are both the node n1; keep one line"),
    ],
)
def test_addresses_of_a_hostfile_are_nodes_of_the_slurm_job(
    nodes: str,
    lines: str,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """mpirun took them for hosts without slots, and srun for nodes that there are not."""
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": nodes, "SLURM_TASKS_PER_NODE": "2(x3)"}
    if nodes == "n[1,3]":
        job["SLURM_TASKS_PER_NODE"] = "2(x2)"
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostname", lambda: "n2")
    monkeypatch.setattr(socket, "gethostbyname_ex", lambda name: (name, [], _ADDRESSES[name]))
    own = {"eth0": [SimpleNamespace(address="10.0.0.2")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: own)
    allocation._addresses_of.cache_clear()
    file = write(tmp_path, lines)
    run(["launch", "--dry-run", "--hostfile", file, "--", "train", "D", "R"])
    told = capsys.readouterr()
    assert shown in told.out + told.err
    allocation._addresses_of.cache_clear()


def test_srun_starts_no_more_ranks_than_there_are_cores_for_all_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_CPUS_PER_NODE": "7"}
    for name, value in {**job, "SLURM_CPUS_PER_TASK": "4"}.items():
        monkeypatch.setenv(name, value)
    hosts = ["--hostfile", write(tmp_path, "n1 slots=2\n")]
    words = ["launch", "--dry-run", *hosts, "--launcher", "srun", "--", "train", "D", "R"]
    assert run(words) == 1
    assert "2 ranks of 4 cores on n1, where the batch job has only 7 cores" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_OVERCOMMIT", "1")
    assert run(words) == 0


def test_this_machine_may_have_a_name_of_its_own_in_its_job_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "launch",
        "--dry-run",
        "--hostfile",
        write(tmp_path, "localhost slots=1\n"),
        "--",
        "train",
        "D",
        "R",
    ]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    monkeypatch.setattr(socket, "gethostname", lambda: "n1")
    assert run(words) == 0
    monkeypatch.setattr(socket, "gethostname", lambda: "login")  # of the shell of salloc
    assert run(words) == 1
    assert "localhost is not one of the hosts of Slurm job 7 (n1)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"},
            "srun has started .* 4 times,.* shell of salloc",
        ),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "4", "SLURM_STEP_NUM_TASKS": "4"},
            "srun has started .* without srun,",
        ),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "mpirun has started .* with -np N"),
        # The shell of srun --pty on one node.
        (
            {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PTY_PORT": "4"},
            "give the number of ranks",
        ),
    ],
)
def test_launch_is_not_started_by_what_starts_ranks(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**SLURM, "SLURM_JOB_NUM_NODES": "1", **variables}.items():
        monkeypatch.setenv(name, value)
    assert run(["launch", "--dry-run", "--", "train", "D", "R"]) == (2 if said.startswith("give") else 1)
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize("setting", ["OMPI_MCA_rmaps_base_oversubscribe", "OMPI_MCA_ras", "PRTE_MCA_ras"])
def test_where_mpirun_is_told_to_count_slots_otherwise_it_is_left_to_it(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"}
    for name, value in {**job, setting: "any"}.items():
        monkeypatch.setenv(name, value)
    hosts = write(tmp_path, "n1 slots=2\n")
    assert run(["launch", "--dry-run", "--hostfile", hosts, "--", "train", "D", "R"]) == 0


@pytest.mark.parametrize("line", ["n1", "n1 two q", "n1 0 q", "-n 2 q"])
def test_a_bad_pe_hostfile_line(tmp_path: Path, line: str) -> None:
    file = write(tmp_path, f"n0 1 q UNDEFINED\n{line}\n")
    with pytest.raises(ConfigError, match=rf"^PE_HOSTFILE={file}"):
        find_allocation({**SGE, "PE_HOSTFILE": file})


@given(st.text(max_size=40))
def test_any_node_list_gives_host_names_or_our_error(text: str) -> None:
    try:
        allocation = find_allocation({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": text})
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    assert allocation is None or all(is_host_name(host.name) for host in allocation.hostfile.hosts)
