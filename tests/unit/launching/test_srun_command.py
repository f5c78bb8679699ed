"""The argv and environment of an srun job, and of horovodrun under LSF."""

from __future__ import annotations

from pathlib import Path

from speechdp.launching.command import horovodrun_environment, srun_command, srun_environment
from speechdp.launching.hostfile import Host
from speechdp.launching.mpi.hydra import Mpich
from speechdp.launching.mpi.job import LaunchJob
from speechdp.launching.mpi.open_mpi import OpenMpi

MPI = OpenMpi(Path("/v/bin/mpirun"), None, 4)
PROGRAM = ("/v/bin/python", "-m", "speechdp")
ARGUMENTS = ("train", "D", "R with blank", "--note", "$(id); `id`")


def test_every_host_gets_as_many_ranks() -> None:
    job = LaunchJob((Host("n1", 2), Host("n2", 2)), PROGRAM, ARGUMENTS)
    assert srun_command(job, MPI, {"HOME": "/h"}) == [
        "srun",
        "--mpi=pmix",
        "--nodes=2",
        "--ntasks=4",
        "--ntasks-per-node=2",
        "--distribution=block",
        "--nodelist=n1,n2",
        "--kill-on-bad-exit=0",
        "--wait=30",
        "--export=ALL",
        "--cpu-bind=none",
        *PROGRAM,
        *ARGUMENTS,
    ]


def test_mpich_and_intel_mpi_are_connected_by_pmi2() -> None:
    mpich = Mpich(Path("/usr/bin/mpiexec.hydra"), None, "4.3.2")
    job = LaunchJob((Host("n1", 2), Host("n2", 2)), PROGRAM, ARGUMENTS)
    assert srun_command(job, mpich, {})[1] == "--mpi=pmi2"
    assert srun_environment(job, mpich, {"HOME": "/h"}) == {"HOME": "/h"}


def test_hosts_with_unequal_numbers_are_named_once_a_rank() -> None:
    argv = srun_command(LaunchJob((Host("n1", 2), Host("n3", 1)), PROGRAM, ()), MPI, {})
    assert argv[2:6] == [
        "--nodes=2",
        "--ntasks=3",
        "--distribution=arbitrary",
        "--nodelist=n1,n1,n3",
    ]


def test_cores_labels_and_more_options() -> None:
    job = LaunchJob((Host("n1", 2),), PROGRAM, (), tag_output=True, extra_options=("--overlap",))
    argv = srun_command(job, MPI, {"SLURM_CPUS_PER_TASK": "6"})
    assert "--cpus-per-task=6" in argv
    assert argv[-5:] == ["--label", "--overlap", *PROGRAM]
    assert not any(
        "cpus-per-task" in word for word in srun_command(job, MPI, {"SLURM_CPUS_PER_TASK": "$(id)"})
    )


def test_what_mpirun_takes_as_options_srun_ranks_find_in_the_environment() -> None:
    job = LaunchJob((Host("n1", 2),), PROGRAM, (), interface="eth0")
    assert srun_environment(
        job, MPI, {"OMPI_MCA_pml": "ucx", "SLURM_NTASKS_PER_NODE": "2", "HOME": "/h"}
    ) == {
        "OMPI_MCA_pml": "ucx",
        "OMPI_MCA_btl": "^openib,ofi",
        "OMPI_MCA_btl_tcp_if_include": "eth0",
        "HOME": "/h",
    }


def test_the_wheels_do_not_look_for_munge() -> None:
    job = LaunchJob((Host("n1", 2),), PROGRAM, ())
    assert srun_environment(job, MPI, {"OPAL_PREFIX": "/v"})["PMIX_MCA_psec"] == "^munge"
    assert (
        srun_environment(job, MPI, {"OPAL_PREFIX": "/v", "PMIX_MCA_psec": "native"})["PMIX_MCA_psec"]
        == "native"
    )


def test_horovodrun_is_not_to_ask_lsf() -> None:
    assert horovodrun_environment({"LSB_JOBID": "7", "LSB_HOSTS": "a b", "A": "1"}) == {
        "LSB_HOSTS": "a b",
        "A": "1",
    }
