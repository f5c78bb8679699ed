"""What the launchers announce, which back-end follows from it, and which worlds are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from speechdp import exit_codes
from speechdp.comm import environment
from speechdp.comm.base import Communicator
from speechdp.comm.environment import (
    Launch,
    announced,
    host_name,
    started_unconnected,
    torchrun_rendezvous,
)
from speechdp.comm.network import interface_between, interface_of
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.startup import create, failure
from speechdp.comm.startup.create import choose_backend
from speechdp.comm.startup.failure import guard
from speechdp.comm.startup.world import check_devices, check_world
from speechdp.comm.threads.communicator import run_threads
from speechdp.errors import CommunicationError, ConfigError, ShardError

MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*MPIRUN, *SRUN, *TORCHRUN, "PMI_RANK", "PMI_SIZE", "HOROVOD_RANK", "HOROVOD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (MPIRUN, Launch("mpirun", 1, 4)),
        (SRUN, Launch("srun", 3, 8)),
        ({**SRUN, **MPIRUN}, Launch("mpirun", 1, 4)),  # mpirun inside a Slurm allocation
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),  # the shell of sbatch or salloc
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PTY_PORT": "3"}, None),  # of salloc, too
        ({**SRUN, "SLURM_PTY_PORT": "3"}, Launch("srun", 3, 8)),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, Launch("horovodrun", 0, 2)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, Launch("PMI", 0, 2)),
        (TORCHRUN, Launch("torchrun", 0, 2)),
        ({"RANK": "captain", "WORLD_SIZE": "2"}, None),
        ({"OMPI_COMM_WORLD_RANK": "", "OMPI_COMM_WORLD_SIZE": "many"}, None),
    ],
)
def test_announced(environ: dict[str, str], expected: Launch | None) -> None:
    assert announced(environ) == expected


def announce(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


def test_auto_is_serial_where_nothing_is_announced() -> None:
    assert choose_backend("auto") == create.BackendChoice("serial")


def test_auto_takes_horovod_where_it_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch, MPIRUN)
    monkeypatch.setattr(create, "_why_not_horovod", lambda: None)
    assert choose_backend("auto") == create.BackendChoice("horovod")


def test_auto_falls_back_to_mpi_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch, MPIRUN)
    monkeypatch.setattr(create.importlib.util, "find_spec", lambda name: None)
    choice = choose_backend("auto")
    assert choice.name == "mpi"
    assert (
        choice.notice == "back-end mpi instead of horovod: Horovod is not installed (launch/setup builds it)"
    )


def test_auto_takes_torch_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch, TORCHRUN)
    assert choose_backend("auto").name == "torch"


def test_what_a_pod_has_in_its_environment_does_not_stand_before_mpirun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorchJob of Kubernetes sets torchrun's variables in every container, also where mpirun is used."""
    announce(monkeypatch, TORCHRUN)
    assert torchrun_rendezvous() == ("a", 1)
    announce(monkeypatch, MPIRUN)
    assert torchrun_rendezvous() is None


def test_ranks_that_share_a_gpu_do_not_exchange_over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch, MPIRUN)
    monkeypatch.setenv("SPEECHDP_RANKS_PER_GPU", "2")
    monkeypatch.setattr(create, "_why_not_horovod", lambda: None)
    monkeypatch.setattr(create, "_has_nccl", lambda: True)
    gpu = torch.device("cuda")
    choice = choose_backend("auto", gpu)
    assert choice.name == "mpi" and "NCCL refuses ranks that share a GPU" in str(choice.notice)
    assert choose_backend("mpi", gpu).name == "mpi"
    for name in ("torch", "horovod"):
        assert choose_backend(name, torch.device("cpu")).name == name
        with pytest.raises(ConfigError, match=f"the {name} back-end .*use SPEECHDP_BACKEND=mpi"):
            choose_backend(name, gpu)
    announce(monkeypatch, {**MPIRUN, "OMPI_COMM_WORLD_SIZE": "1"})
    assert choose_backend("torch", gpu).name == "torch"  # alone it shares with nobody
    announce(monkeypatch, MPIRUN)
    monkeypatch.setattr(create, "_has_nccl", lambda: False)  # over the host's memory
    assert choose_backend("auto", gpu).name == choose_backend("horovod", gpu).name == "horovod"
    for name in MPIRUN:
        monkeypatch.delenv(name)
    announce(monkeypatch, TORCHRUN)
    with pytest.raises(ConfigError, match="SPEECHDP_BACKEND=mpi, and start the ranks by speechdp launch"):
        choose_backend("auto", gpu)


def test_an_unknown_back_end_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'nccl'; choose one of: auto, serial, horovod, mpi, torch"):
        choose_backend("nccl")


def test_a_back_end_that_is_not_installed_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(create._MODULES, "horovod", ("speechdp.comm.missing", "X"))
    with pytest.raises(CommunicationError, match=r"horovod back-end is not available .*launch/setup"):
        create.create_communicator("horovod")


def test_a_single_process_does_not_initialise_mpi() -> None:
    code = (
        "import sys; from speechdp.comm.startup import create; c = create.create_communicator('auto'); "
        "c.close(); print(c.backend, any(m.startswith(('mpi4py', 'horovod')) for m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.split() == ["serial", "False"]


def test_equal_ranks_pass() -> None:
    run_threads(4, lambda comm: check_world(comm, {"seed": 1, "data checksum": "abc"}))
    check_world(SerialCommunicator(), {"seed": 1})


@pytest.mark.parametrize(
    ("key", "values", "remedy"),
    [
        ("torch version", ["2.13.0", "2.12.1"], "install the same version on every node"),
        ("seed", [1, 2], "start every rank with the same command line"),
        ("data checksum", ["aa", "bb"], "let every rank read the same data directory"),
        ("learning rate", [0.1, None], "start every rank with the same command line"),
    ],
)
def test_a_difference_names_ranks_hosts_values_and_remedy(
    key: str, values: list[object], remedy: str
) -> None:
    def work(comm: Communicator) -> str:
        with pytest.raises(CommunicationError) as caught:
            check_world(comm, {key: values[comm.rank == 3]})
        return str(caught.value)

    host = host_name()
    expected = f"ranks 0 ({host}) and 3 ({host}) differ in the {key}: {values[0]} and {values[1]}; {remedy}"
    for message in run_threads(4, work):
        assert message.startswith(expected)
        assert "\n" not in message


@pytest.mark.parametrize("kinds", ["cpu cpu cuda cuda", "cuda cuda cpu cuda"])
def test_ranks_that_would_compute_on_gpus_and_on_the_cpu_are_refused(kinds: str) -> None:
    """Their flat vectors have other layouts: sums over them would be of other parameters."""
    named = kinds.split()
    on_gpu, on_cpu = named.index("cuda"), named.index("cpu")

    def work(comm: Communicator) -> str:
        with pytest.raises(CommunicationError) as caught:
            check_devices(comm, torch.device(named[comm.rank]))
        return str(caught.value)

    host = host_name()
    expected = f"rank {on_gpu} on {host} would compute on a GPU and rank {on_cpu} on {host} on the CPU, "
    for message in run_threads(4, work):
        assert message.startswith(expected)
        assert "check the driver on " + host in message and 'device="cpu"' in message and "\n" not in message
    run_threads(2, lambda comm: check_devices(comm, torch.device("cuda")))
    check_devices(SerialCommunicator(), torch.device("cpu"))


@pytest.mark.parametrize(("environ", "said"), [(SRUN, "srun started 8"), (MPIRUN, "mpirun started 4")])
def test_ranks_that_would_train_alone_are_refused(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], said: str
) -> None:
    announce(monkeypatch, environ)
    with pytest.raises(CommunicationError, match=f"{said} processes, but each is alone"):
        check_world(SerialCommunicator(), {})


@pytest.mark.parametrize("backend", ["auto", "mpi", "horovod"])
def test_srun_without_pmix_is_refused_before_mpi_starts(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    announce(monkeypatch, SRUN)
    monkeypatch.delenv("PMIX_NAMESPACE", raising=False)
    with pytest.raises(CommunicationError, match=r"srun started 8 processes without PMIx.*srun --mpi=pmix"):
        create.create_communicator(backend)
    with pytest.raises(CommunicationError, match="srun started 8 processes without PMIx"):
        create.create_fed_job(backend, 1)


def test_srun_with_pmix_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch, {**SRUN, "PMIX_NAMESPACE": "slurm.pmix.1.0"})
    assert started_unconnected() is None


@pytest.mark.parametrize(
    ("error", "exit_code", "printed"),
    [
        (ShardError("a.h5 is truncated"), 1, "speechdp: a.h5 is truncated\n"),
        (SystemExit(3), 3, "speechdp: ended with exit code 3\n"),
        (SystemExit("no"), 1, "speechdp: no\n"),
        (SystemExit(["no", "hash"]), 1, "speechdp: ['no', 'hash']\n"),
        (KeyboardInterrupt(), 130, "speechdp: interrupted\n"),
    ],
)
def test_guard_of_a_single_rank_prints_one_line_and_returns_the_code(
    capsys: pytest.CaptureFixture[str], error: BaseException, exit_code: int, printed: str
) -> None:
    def fail(comm: Communicator) -> int:
        raise error

    assert guard(SerialCommunicator, fail) == exit_code
    assert capsys.readouterr().err == printed


def test_guard_prints_the_traceback_of_a_defect_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert guard(SerialCommunicator, lambda comm: 1 // 0) == exit_codes.CRASHED
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1].startswith("speechdp: ended by an unexpected ZeroDivisionError: ")


def test_guard_passes_on_success_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert guard(SerialCommunicator, lambda comm: None) == 0
    assert guard(SerialCommunicator, lambda comm: sys.exit(0)) == 0
    assert capsys.readouterr().err == ""
    assert guard(SerialCommunicator, lambda comm: 4) == 4


class OneOfTwo(SerialCommunicator):
    """Says that there is another rank, and lives on after it has ended all."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2

    def abort(self, exit_code: int) -> NoReturn:
        raise AbortedError(exit_code)


class AbortedError(Exception):
    """All ranks have been ended."""


@pytest.mark.parametrize("code", [0, None])
def test_sys_exit_of_one_of_many_ends_all(capsys: pytest.CaptureFixture[str], code: int | None) -> None:
    with pytest.raises(AbortedError, match=f"^{exit_codes.CRASHED}$"):
        guard(OneOfTwo, lambda comm: sys.exit(code))
    said = capsys.readouterr().err
    assert said.startswith(f"speechdp: rank 0 on {host_name()}: left by sys.exit")
    assert said.count("\n") == 1


@pytest.mark.parametrize(("code", "exit_code"), [(3, 3), (-1, 255), (256, exit_codes.FAILED), (512 + 7, 7)])
def test_a_failure_stays_one_in_the_8_bits_that_the_system_keeps(
    capsys: pytest.CaptureFixture[str], code: int, exit_code: int
) -> None:
    with pytest.raises(AbortedError, match=f"^{exit_code}$"):
        guard(OneOfTwo, lambda comm: sys.exit(code))
    assert capsys.readouterr().err.endswith(f": ended with exit code {code}\n")


@pytest.mark.parametrize(
    ("rank", "has_been_said", "waits"),
    [
        (0, False, []),
        (1, False, [failure._OTHERS_DELAY_S]),
        (0, True, [environment._ENDED_WITHIN_S]),
        (1, True, [failure._OTHERS_DELAY_S, environment._ENDED_WITHIN_S]),
    ],
)
def test_a_rank_waits_to_be_ended_where_another_has_said_why(
    rank: int, has_been_said: bool, waits: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine mpirun ended it late, and the job said twice what was wrong."""
    monkeypatch.setenv("PMIX_SERVER_TMPDIR", str(tmp_path))
    if has_been_said:
        environment.note_reported()
    waited: list[float] = []
    monkeypatch.setattr(environment.time, "sleep", waited.append)

    def fail(comm: Communicator) -> None:
        comm.rank = rank
        raise ShardError("train-00000.h5 is truncated")

    with pytest.raises(AbortedError):
        guard(OneOfTwo, fail)
    assert waited == waits
    assert environment.has_reported()


def test_ranks_of_one_host_talk_over_loopback() -> None:
    assert interface_between(1, ["a", "a", "a"]).name == "lo"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") is None


def test_a_host_that_cannot_be_reached_is_named() -> None:
    with pytest.raises(CommunicationError, match=r"rank 0 on a cannot reach no-such-host\.invalid"):
        interface_between(0, ["a", "no-such-host.invalid"])
