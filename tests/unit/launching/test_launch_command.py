"""The command line and environment a job is started with, and the verdict on its end."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

import pytest

from speechdp.cli import launch
from speechdp.cli.main import run
from speechdp.errors import ConfigError
from speechdp.launching.allocation import Allocation
from speechdp.launching.command import (
    child_environment,
    horovodrun_command,
    python_program,
    share_of_cores,
)
from speechdp.launching.cores import available_cores
from speechdp.launching.hostfile import Host, Hostfile
from speechdp.launching.mpi.hydra import Hydra, IntelMpi, Mpich
from speechdp.launching.mpi.job import LaunchJob, forwarded_names
from speechdp.launching.mpi.open_mpi import OpenMpi
from speechdp.launching.programs import find_horovodrun, find_mpirun

MPI4 = OpenMpi(Path("/v/bin/mpirun"), Path("/v"), 4)
MPI5 = OpenMpi(Path("/v/bin/mpirun"), Path("/v"), 5)
MPICH = Mpich(Path("/usr/bin/mpiexec.hydra"), None, "4.3.2")
INTEL = IntelMpi(Path("/opt/intel/bin/mpiexec.hydra"), None, "2021.15")
SYSTEM_MPI = OpenMpi(Path("/usr/bin/mpirun"), None, 4)
LOCAL = (Host("localhost", 2),)
CLUSTER = (Host("node01", 4), Host("node02", 3))
PROGRAM = ("/v/bin/python", "-m", "speechdp")
ARGUMENTS = ("train", "D", "R with blank", "--note", "$(id); `id`")


def settings(argv: list[str], flag: str = "--mca") -> dict[str, str]:
    return {argv[i + 1]: argv[i + 2] for i, word in enumerate(argv) if word == flag}


def test_mpirun_on_this_machine() -> None:
    argv = MPI4.command(LaunchJob(LOCAL, PROGRAM, ARGUMENTS), {"PATH": "/bin", "HOME": "/root"})
    assert argv[:5] == ["/v/bin/mpirun", "-np", "2", "--host", "localhost:2"]
    assert argv[-8:] == [*PROGRAM, *ARGUMENTS]
    assert argv[argv.index("--prefix") + 1] == "/v"
    assert argv[argv.index("--bind-to") + 1] == "none"
    assert argv[argv.index("--map-by") + 1] == "slot"
    assert settings(argv) == {"pml": "ob1", "btl": "^openib,ofi,tcp"}  # with tcp, every rank would listen
    assert "--tag-output" not in argv
    assert [argv[i + 1] for i, word in enumerate(argv) if word == "-x"] == ["PATH"]


def test_hydra_that_does_not_end_a_job_at_once_never_does() -> None:
    """Where srun starts its ranks, srun ends them."""
    mpirun, srun = (launch.LaunchCommand(ARGUMENTS, launcher=launcher) for launcher in ("mpirun", "srun"))
    grace_s = launch.StopPolicy().gone_grace_s
    assert launch._stop_policy(mpirun, LOCAL, MPICH).gone_grace_s == MPICH.gone_grace_s < grace_s
    assert launch._stop_policy(srun, LOCAL, MPICH).gone_grace_s == grace_s
    assert launch._stop_policy(mpirun, LOCAL, MPI5).gone_grace_s == grace_s


def test_mpirun_on_several_hosts_notices_a_cut_cable() -> None:
    job = LaunchJob(
        CLUSTER, PROGRAM, ARGUMENTS, interface="eth0", tag_output=True, extra_options=("--mca", "a", "b")
    )
    argv = MPI4.command(job, {})
    assert argv[2:5] == ["7", "--host", "node01:4,node02:3"]
    known = settings(argv)
    assert known["oob_tcp_keepalive_time"] == "5"
    assert known["btl_tcp_if_include"] == known["oob_tcp_if_include"] == "eth0"
    assert known["a"] == "b"
    assert "--tag-output" in argv


def test_open_mpi_5_names_its_runtime_settings_otherwise() -> None:
    argv = MPI5.command(LaunchJob(CLUSTER, PROGRAM, (), interface="eth0"), {})
    assert set(settings(argv, "--prtemca")) == {
        "oob_tcp_keepalive_time",
        "oob_tcp_keepalive_intvl",
        "oob_tcp_keepalive_probes",
        "oob_tcp_if_include",
    }
    assert not any(name.startswith("oob_") for name in settings(argv))


def test_what_another_start_waits_for_is_killed_at_once() -> None:
    for mpi, flag in ((MPI4, "--mca"), (MPI5, "--prtemca")):
        argv = mpi.command(LaunchJob(LOCAL, PROGRAM, ARGUMENTS, ends_at_once=True), {})
        assert settings(argv, flag)["odls_base_sigkill_timeout"] == "0"
        assert "odls_base_sigkill_timeout" not in mpi.command(LaunchJob(LOCAL, PROGRAM, ARGUMENTS), {})


def test_open_mpi_5_goes_on_after_a_loss_only_if_the_command_can() -> None:
    tolerant = LaunchJob(LOCAL, PROGRAM, ("train", "D", "R", "--tolerate-loss"))
    argv = MPI5.command(tolerant, {})
    assert argv[argv.index("--with-ft") + 1] == "ulfm"
    assert settings(argv)["mpi_ft_detector"] == "0"
    # Open MPI 4 knows no such option; the ranks say what is missing.
    for job, mpi in ((tolerant, MPI4), (LaunchJob(LOCAL, PROGRAM, ARGUMENTS), MPI5)):
        assert "--with-ft" not in mpi.command(job, {})


@pytest.mark.parametrize("option", ["--mca", "-mca", "--gmca"])
def test_mpirun_is_not_told_twice_what_the_user_tells_it(option: str) -> None:
    """It would end with "MCA parameter has been listed multiple times"."""
    given = (
        option,
        "btl",
        "^openib",
        "--mca",
        "oob_tcp_keepalive_time",
        "9",
        "--mca",
        "mpi_ft_detector",
        "1",
    )
    job = LaunchJob(CLUSTER, PROGRAM, ("train", "D", "R", "--tolerate-loss"), extra_options=given)
    argv = MPI4.command(job, {})
    assert argv.count("btl") == argv.count("oob_tcp_keepalive_time") == 1
    assert settings(argv)["pml"] == "ob1" and settings(argv)["oob_tcp_keepalive_intvl"] == "2"
    assert MPI5.command(job, {}).count("mpi_ft_detector") == 1
    horovodrun = horovodrun_command(
        LaunchJob(CLUSTER, PROGRAM, (), extra_options=given[3:]), ("h",), "mpi", MPI4
    )
    assert " ".join(horovodrun).count("oob_tcp_keepalive_time") == 1


def test_what_the_environment_says_is_not_overruled() -> None:
    """mpirun takes its options before OMPI_MCA_NAME, Open MPI 5's daemons theirs before PRTE_MCA_NAME."""
    job = LaunchJob(CLUSTER, PROGRAM, (), interface="eth0")
    environment = {"OMPI_MCA_pml": "ucx", "OMPI_MCA_oob_tcp_keepalive_time": "9"}
    others = settings(MPI4.command(job, environment)).keys()
    assert others.isdisjoint({"pml", "oob_tcp_keepalive_time"})
    of_daemons = MPI5.command(job, {"PRTE_MCA_oob_tcp_keepalive_time": "9"})
    assert "oob_tcp_keepalive_time" not in settings(of_daemons, "--prtemca")


def test_the_interface_named_for_this_job_is_that_of_its_traffic() -> None:
    job = LaunchJob(CLUSTER, PROGRAM, (), interface="eth0")
    of_a_site = {"OMPI_MCA_oob_tcp_if_include": "ib0", "OMPI_MCA_btl_tcp_if_include": "ib0"}
    found = settings(MPI4.command(job, of_a_site))
    assert (found["oob_tcp_if_include"], found["btl_tcp_if_include"]) == ("eth0", "eth0")
    of_daemons = MPI5.command(job, {"PRTE_MCA_oob_tcp_if_include": "ib0"})
    assert settings(of_daemons, "--prtemca")["oob_tcp_if_include"] == "eth0"


@pytest.mark.parametrize("name", ["pml", "btl", "btl_tcp_if_include"])
def test_what_horovodrun_tells_mpirun_itself_is_refused(name: str) -> None:
    job = LaunchJob(CLUSTER, PROGRAM, (), extra_options=("-mca", name, "x"))
    with pytest.raises(ConfigError, match=f"^--mpi-args: horovodrun gives mpirun {name} .*--launcher mpirun"):
        horovodrun_command(job, ("h",), "mpi", MPI4)


def test_the_systems_mpirun_gets_no_prefix() -> None:
    assert "--prefix" not in SYSTEM_MPI.command(LaunchJob(LOCAL, PROGRAM, ()), {})


def test_horovodrun_over_mpi_hands_on_the_options_in_one_word() -> None:
    job = LaunchJob(LOCAL, PROGRAM, ARGUMENTS, extra_options=("--mca", "plm_rsh_agent", "ssh -F f"))
    argv = horovodrun_command(job, ("/v/bin/python", "/v/bin/horovodrun"), "mpi", MPI4)
    assert argv[:7] == ["/v/bin/python", "/v/bin/horovodrun", "-np", "2", "-H", "localhost:2", "--mpi"]
    assert argv[8:] == [*PROGRAM, *ARGUMENTS]
    options = shlex.split(argv[7].removeprefix("--mpi-args="))
    assert options[:2] == ["--prefix", "/v"]
    # pml and btl are given by Horovod, and mpirun refuses to be told twice.
    assert settings(options) == {"plm_rsh_agent": "ssh -F f"}
    with pytest.raises(ConfigError, match=r"openmpi==4\.1\.8"):
        horovodrun_command(job, ("h",), "mpi", MPI5)


def test_horovodrun_over_gloo() -> None:
    job = LaunchJob(CLUSTER, PROGRAM, ARGUMENTS, interface="eth0")
    argv = horovodrun_command(job, ("horovodrun",), "gloo", None)
    wanted = ["horovodrun", "-np", "7", "-H", "node01:4,node02:3", "--network-interfaces", "eth0", "--gloo"]
    assert argv == [*wanted, *PROGRAM, *ARGUMENTS]
    with pytest.raises(ConfigError, match="--mpi-args has no meaning"):
        horovodrun_command(LaunchJob(LOCAL, PROGRAM, (), extra_options=("x",)), ("h",), "gloo", None)


@pytest.mark.parametrize("name", ["eth0; id", "-x", "", "a b"])
def test_an_interface_is_a_name(name: str) -> None:
    with pytest.raises(ConfigError, match="--interface"):
        LaunchJob(LOCAL, PROGRAM, (), interface=name)


def test_an_interface_that_this_host_does_not_have_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["launch", "-np", "2", "--dry-run", "--interface"]
    assert run([*command, "nowhere0", "--", "train", "D", "R"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith("speechdp: --interface nowhere0: ")
    assert run([*command, "lo", "--", "train", "D", "R"]) == 0


def test_environment_of_root_and_of_a_user() -> None:
    job = LaunchJob((Host("a", 3), Host("b", 1)), PROGRAM, ())
    root = child_environment(job, MPI4, {"PATH": "/bin"}, is_root=True, cores=2)
    assert root["OMPI_ALLOW_RUN_AS_ROOT"] == root["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    assert root["OMP_NUM_THREADS"] == "2"
    assert root["PATH"] == "/v/bin:/bin"
    assert root["OPAL_PREFIX"] == "/v"
    assert "OMPI_MCA_plm" not in root
    user = child_environment(job, SYSTEM_MPI, {"OMP_NUM_THREADS": "5"}, is_root=False, cores=1)
    assert user == {"OMP_NUM_THREADS": "5"}
    assert child_environment(job, MPI4, root, is_root=True, cores=4) == root
    assert child_environment(job, SYSTEM_MPI, {}, is_root=False, cores=None) == {}


def test_daemons_in_a_slurm_job_have_an_environment_and_wait_for_no_step_of_a_lost_node() -> None:
    job = LaunchJob((Host("a", 1), Host("b", 1)), PROGRAM, ())
    slurm = {"SLURM_JOB_ID": "7", "SLURM_EXPORT_ENV": "NONE"}
    environment = child_environment(job, SYSTEM_MPI, slurm, is_root=False, cores=None)
    assert environment == {"SLURM_JOB_ID": "7", "SLURM_EXPORT_ENV": "ALL", "SLURM_OVERLAP": "1"}


def test_a_job_on_this_machine_needs_no_ssh() -> None:
    environment = child_environment(LaunchJob(LOCAL, PROGRAM, ()), MPI4, {}, is_root=False, cores=1)
    assert environment["OMPI_MCA_plm"] == "isolated"


def test_ranks_share_the_cores_of_the_fullest_host() -> None:
    assert share_of_cores((Host("localhost", 3), Host("127.0.0.1", 1)), None, 8) == 2
    assert share_of_cores((Host("localhost", 9),), None, 2) == 1
    # The nodes of a batch job are alike, where it does not say what they have.
    pbs = Allocation("pbs", "7", Hostfile("S", CLUSTER))
    assert share_of_cores((Host("localhost", 3), Host("b", 4)), pbs, 8) == 2
    # Another host may have fewer cores, or more.
    assert share_of_cores((Host("localhost", 3), Host("b", 1)), None, 8) is None
    # What the hosts have is not known here: each rank looks at its own.
    assert share_of_cores((Host("n1", 3), Host("n2", 1)), None, 8) is None


def test_the_cores_of_a_slurm_job_are_shared_not_those_of_the_login_node() -> None:
    slurm = Allocation("slurm", "7", Hostfile("S", CLUSTER), cores={"node01": 24, "node02": 12})
    assert share_of_cores(CLUSTER, slurm, 2) == 4  # 24 for 4 ranks, 12 for 3
    assert share_of_cores(CLUSTER[:1], slurm, 2) == 6
    assert share_of_cores(LOCAL, slurm, 8) == 4  # hosts of a hostfile, not the job's


@pytest.mark.parametrize(
    ("threads", "ncpus", "cores", "wanted"),
    [
        ("24", "24", 6, "6"),  # PBS's, all that a node has for 4 ranks
        ("24", "24", 16, "6"),  # the same on a node of 64 cores
        ("6", "6", 6, "6"),  # ompthreads=6, or a chunk for each rank
        ("8", "24", 6, "8"),  # the user's own
        ("2", "2", 1, "1"),
        ("24", "24", None, "24"),
    ],
)
def test_all_cores_of_a_node_are_no_share_of_a_rank(
    threads: str, ncpus: str, cores: int | None, wanted: str
) -> None:
    pbs = {"PBS_JOBID": "1.server", "NCPUS": ncpus, "OMP_NUM_THREADS": threads}
    job = LaunchJob((Host("node01", 4), Host("node02", 4)), PROGRAM, ())
    assert child_environment(job, None, pbs, is_root=False, cores=cores)["OMP_NUM_THREADS"] == wanted
    del pbs["PBS_JOBID"]
    assert child_environment(job, None, pbs, is_root=False, cores=cores)["OMP_NUM_THREADS"] == threads


def test_few_variables_travel() -> None:
    names = forwarded_names(
        LaunchJob(CLUSTER, PROGRAM, ()),
        dict.fromkeys(("PATH", "AWS_SECRET", "HOROVOD_CYCLE_TIME", "NCCL_DEBUG", "SPEECHDP_X", "HOME"), ""),
    )
    assert names == ["HOROVOD_CYCLE_TIME", "NCCL_DEBUG", "PATH", "SPEECHDP_X"]


@pytest.mark.parametrize(
    ("gpus", "travels_by_ssh", "travels_in_batch_job"),
    [
        ("0,1", True, False),
        ("GPU-8932f937-d72c", False, False),
        ("0,MIG-8932f937-d72c", False, False),
        ("", True, True),
        ("-1", True, True),
        ("NoDevFiles", True, True),
    ],
)
def test_the_first_nodes_gpus_are_not_imposed_on_the_others(
    gpus: str, travels_by_ssh: bool, travels_in_batch_job: bool
) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": gpus, "CUDA_LAUNCH_BLOCKING": "1"}
    for in_batch_job, travels in ((False, travels_by_ssh), (True, travels_in_batch_job)):
        job = LaunchJob(CLUSTER, PROGRAM, (), in_batch_job=in_batch_job)
        names = forwarded_names(job, environment)
        assert names == ["CUDA_LAUNCH_BLOCKING", *(["CUDA_VISIBLE_DEVICES"] if travels else [])]
        assert ("CUDA_VISIBLE_DEVICES" in MPI4.command(job, environment)) == travels
        here = LaunchJob(LOCAL, PROGRAM, (), in_batch_job=in_batch_job)
        assert "CUDA_VISIBLE_DEVICES" in forwarded_names(here, environment)


@pytest.mark.parametrize(
    ("quota", "at_most"), [("100000 100000", 1), ("50000 100000", 1), ("max 100000", 10**6)]
)
def test_a_containers_quota_counts(tmp_path: Path, quota: str, at_most: int) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(quota + "\n")
    assert 1 <= available_cores(path) <= at_most
    assert available_cores(tmp_path / "missing") == len(os.sched_getaffinity(0))


def fake_mpirun(folder: Path, version: str) -> Path:
    path = folder / "bin" / "mpirun"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_environments_mpirun_comes_first(tmp_path: Path) -> None:
    own = fake_mpirun(tmp_path / "own", "mpirun (Open MPI) 4.1.8")
    other = fake_mpirun(tmp_path / "other", "mpirun (Open MPI) 5.0.11")
    path = f"{other.parent}:/usr/bin:/bin"
    assert find_mpirun(tmp_path / "own", path) == OpenMpi(own, tmp_path / "own", 4)
    assert find_mpirun(tmp_path / "none", path) == OpenMpi(other, None, 5)


@pytest.mark.parametrize(
    ("says", "wanted"),
    [
        ("HYDRA build details:\n    Version:    4.3.2", Mpich),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.15 Build 20250213 (id: d23)", IntelMpi),
    ],
)
def test_hydra_is_called_by_its_own_name(tmp_path: Path, says: str, wanted: type[Hydra]) -> None:
    """Intel MPI's mpirun is a script that fails without more on PATH."""
    hydra = fake_mpirun(tmp_path, "nothing").with_name("mpiexec.hydra")
    hydra.write_text(f"#!/bin/sh\necho '{says}'\n")
    hydra.chmod(0o755)
    found = find_mpirun(tmp_path, "")
    assert isinstance(found, wanted) and found.mpirun == hydra


def test_hydra_on_this_machine_takes_no_ssh_and_watches_each_rank() -> None:
    job = LaunchJob(LOCAL, PROGRAM, ARGUMENTS, tag_output=True, extra_options=("-verbose",))
    argv = MPICH.command(job, {"PATH": "/bin", "FI_PROVIDER": "tcp", "SECRET": "x"})
    assert argv[:7] == [str(MPICH.mpirun), "-n", "2", "-launcher", "fork", "-hosts", "localhost"]
    assert argv[7:11] == ["-prepend-rank", "-genvlist", "FI_PROVIDER,PATH", "-verbose"]
    assert Path(argv[13]).name == "rank_process.py" and argv[14:] == [*PROGRAM, *ARGUMENTS]


def test_each_hydra_counts_the_ranks_of_hosts_in_its_own_way() -> None:
    job = LaunchJob(CLUSTER, PROGRAM, (), interface="eth0")
    of_mpich, of_intel = (" ".join(mpi.command(job, {})) for mpi in (MPICH, INTEL))
    assert "-n 7 -hosts node01:4,node02:3 -iface eth0" in of_mpich
    repeated = ",".join(["node01"] * 4 + ["node02"] * 3)
    assert f"-n 7 -hosts {repeated} -ppn 1 -iface eth0" in of_intel
    environment = child_environment(job, INTEL, {}, is_root=True, cores=None)
    assert environment["FI_TCP_IFACE"] == environment["UCX_NET_DEVICES"] == "eth0"
    assert environment["I_MPI_PIN"] == "0" and not any(name.startswith("OMPI_") for name in environment)
    assert "I_MPI_PIN" not in INTEL.settings(job, {"I_MPI_PIN": "1"}, is_root=False)


def test_horovodrun_over_mpi_takes_open_mpi_only() -> None:
    with pytest.raises(
        ConfigError, match=r"over Open MPI, but .* belongs to MPICH 4\.3\.2; use --launcher mpirun"
    ):
        horovodrun_command(LaunchJob(LOCAL, PROGRAM, ()), ("h",), "mpi", MPICH)


def test_the_mpi_of_setup_comes_before_that_of_path(tmp_path: Path) -> None:
    chosen = fake_mpirun(tmp_path / "chosen", "mpirun (Open MPI) 5.0.11")
    other = fake_mpirun(tmp_path / "other", "mpirun (Open MPI) 4.1.8")
    path = f"{other.parent}:/usr/bin:/bin"
    assert find_mpirun(tmp_path, path) == OpenMpi(other, None, 4)
    (tmp_path / "speechdp-setup.choices").write_text(f"mpi={chosen.parent.parent}\nmpi_version=Open MPI v5\n")
    assert find_mpirun(tmp_path, path) == OpenMpi(chosen, None, 5)


def test_no_or_another_mpi_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no mpirun in .*run launch/setup"):
        find_mpirun(tmp_path, str(tmp_path))
    mpirun = fake_mpirun(tmp_path, "LAM 7.1")
    with pytest.raises(ConfigError, match="belongs to neither Open MPI, MPICH nor Intel MPI"):
        find_mpirun(tmp_path, "/usr/bin:/bin")
    mpirun.write_text("#!/bin/sh\nkill -KILL $$\n")
    with pytest.raises(ConfigError, match="mpirun --version was killed by SIGKILL; try again, or run launch"):
        find_mpirun(tmp_path, "/usr/bin:/bin")
    with pytest.raises(ConfigError, match="launch/build_horovod"):
        find_horovodrun(tmp_path, str(tmp_path))


@pytest.mark.parametrize(
    "words",
    [
        "-m speechdp train D R",
        "-um speechdp train D R",
        "-mspeechdp",
        "-X dev -W ignore -Wdefault -m speechdp train D R",
        "/v/bin/speechdp train D R",
    ],
)
def test_a_speechdp_command_is_no_script(words: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"do not start a speechdp command with python, .* after --: \.\.\. -- train DATA RUN$",
    ):
        python_program(["python3.11", *words.split()], Path("/v/bin/python"))


@pytest.mark.parametrize(
    "words",
    [
        "-m own speechdp",
        "-m speechdp_own",
        "own.py -m speechdp",
        "speechdp.py",
        "-u own.py speechdp",
        "-m",
        "",
    ],
)
def test_a_script_is_left_to_python(words: str) -> None:
    assert python_program(["python", *words.split()], Path("/v/bin/python")) == ("/v/bin/python",)
