"""Read the launcher's environment variables and set those of MPI and Horovod.

Nothing else in comm/ does, except that `mpi/abi.py` reads one variable more to recognise Hydra.  Settings are
defaults: a variable that the user has set is left unchanged.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import stat
import struct
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from speechdp.comm.waiting import sleep_until
from speechdp.process.bounded import bounded

#: Which algorithm Open MPI uses for which message size; see the file itself and docs/communicators.md.
ALLREDUCE_RULES = Path(__file__).with_name("openmpi_allreduce.rules")

_OPEN_MPI_DEFAULTS = {
    # A waiting rank yields its core: a 4 MB allreduce on a full node takes 10 ms instead of 37.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # Open MPI's own choice for large messages is 1.9 times slower than ring over a 1 Gbit link.
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_dynamic_rules_filename": str(ALLREDUCE_RULES),
    # Ring, for the non-blocking allreduce that is used between hosts.
    "OMPI_MCA_coll_libnbc_iallreduce_algorithm": "1",
    # Two ranks that send to each other over one connection mostly take turns; over two they do not.
    "OMPI_MCA_btl_tcp_links": "2",
    # libfabric, for one-sided exchanges, which are not used here: shutting it down takes each job a second.
    "OMPI_MCA_btl": "^ofi",
}

#: Variable with the process that waits for a rank under Hydra and reports how it ended
#: (launching/mpi/rank_process.py).
_RANK_PARENT = "SPEECHDP_RANK_PARENT"

#: `HOROVOD_CYCLE_TIME` for rare exchanges, and for only a few exchanges in all, ms.
RARE_CYCLE_MS, FEW_CYCLE_MS = 5, 20

_HOROVOD_DEFAULTS = {
    # Fused buffers hold whatever happened to be ready.  The order of summation, and with it the last bit,
    # would differ from run to run, and `--resume` could not be bitwise.  Our buffers are flat anyway.
    "HOROVOD_FUSION_THRESHOLD": "0",
    # How long Horovod's background thread sleeps between polls for work, ms; docs/communicators.md has
    # the measurement.
    "HOROVOD_CYCLE_TIME": "1",
    # A peer that does not answer for this long is considered dead; Gloo only.
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "120",
    # The others may wait minutes for a rank's evaluation; Horovod is to warn only after that.
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "300",
    # Our own one-line messages say what Horovod's warnings about failed exchanges say.
    "HOROVOD_LOG_LEVEL": "error",
}


@dataclass(frozen=True)
class Launch:
    """What the launcher's variables say about this process.

    Attributes:
        launcher: `mpirun`, `horovodrun`, `srun`, `torchrun` or `PMI`.
        rank: index of this process among those started.
        size: number of processes started.
    """

    launcher: str
    rank: int
    size: int


# First match wins.  Under mpirun inside a Slurm allocation the Slurm variables describe the daemons, so
# they come last; SLURM_STEP_NUM_TASKS exists only in what srun started, not in sbatch's shell.
_LAUNCHERS = (
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE"),
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("PMI", "PMI_RANK", "PMI_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


#: Variables that show that ranks of srun can be connected: of PMIx, Cray's PMI, and Intel MPI.
_CONNECTED_BY_SRUN = ("PMIX_NAMESPACE", "PMI_CONTROL_PORT", "I_MPI_PMI_LIBRARY")
#: How long a rank waits to be ended once another has said why, s.
_ENDED_WITHIN_S = 10.0


def announced(environ: Mapping[str, str] | None = None) -> Launch | None:
    """Return what the launcher's variables say, or None if a shell started this process."""
    environ = os.environ if environ is None else environ
    for launcher, rank, size in _LAUNCHERS:
        if launcher == "torchrun" and "MASTER_ADDR" not in environ:
            continue  # other programs set RANK, too
        if launcher in ("PMI", "srun") and environ.get("SLURM_PTY_PORT") and environ.get(size) == "1":
            continue  # a shell of salloc, which may be a step of one task, or of srun --pty
        if environ.get(rank, "").isdigit() and environ.get(size, "").isdigit():
            return Launch(launcher, int(environ[rank]), int(environ[size]))
    return None


def started_unconnected() -> Launch | None:
    """Return the launch if srun started this job without PMIx, so that MPI cannot connect it, else None.

    Open MPI 4 would end each process with a page of text; Open MPI 5 would let each train by itself.
    Cray's MPI has a channel of its own, and so has Intel's if it knows where Slurm's library is.
    """
    launch = announced()
    if launch is None or launch.launcher != "srun" or launch.size == 1:
        return None
    if any(name in os.environ for name in _CONNECTED_BY_SRUN):
        return None
    return launch


def host_name() -> str:
    """Return this host's name without its domain."""
    return socket.gethostname().split(".")[0]


def prepare_open_mpi() -> None:
    """Set Open MPI's defaults.  Call it before MPI is initialised; harmless under another MPI."""
    _set_defaults(_OPEN_MPI_DEFAULTS)
    prefix = Path(sys.prefix)
    if "OPAL_PREFIX" not in os.environ and (prefix / "bin" / "orted").exists():
        # The wheel was built for another prefix.  mpirun sets this for its children; a process started
        # without mpirun must set it itself.
        os.environ["OPAL_PREFIX"] = str(prefix)
    if announced() is None:
        # A single process launches nothing; without this, Open MPI 4 requires ssh all the same.
        _set_defaults({"OMPI_MCA_plm": "isolated"})


def prepare_horovod() -> None:
    """Set Horovod's defaults and, as it may run over MPI, Open MPI's.  Call it before `hvd.init`."""
    prepare_open_mpi()
    _set_defaults(_HOROVOD_DEFAULTS)


def fault_tolerance_on() -> bool:
    """Return whether Open MPI 5 lets a job continue without lost ranks (mpirun --with-ft ulfm)."""
    value = os.environ.get("OMPI_MCA_mpi_ft_enable", "")  # noqa: SIM112  Open MPI's spelling
    return value.lower() in {"1", "true", "yes"}


def expect_rare_exchanges(cycle_ms: int = RARE_CYCLE_MS) -> None:
    """Let Horovod poll for work less often: polling costs a rank without work a few per cent, or more.

    For strategies that do not exchange at every step, and for jobs that do not train.  An exchange then waits
    `cycle_ms` / 2 longer on average.  Call it before the communicator is made; the user's setting is kept.
    """
    os.environ.setdefault("HOROVOD_CYCLE_TIME", str(cycle_ms))


def horovod_controller() -> str | None:
    """Return the controller (`gloo` or `mpi`) the user or horovodrun chose for Horovod; None: none."""
    for name in ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"):
        if os.environ.get(name):
            return os.environ[name].lower()
    return None


def mpi_is_held_to_tcp() -> bool:
    """Return whether Open MPI is restricted to TCP, without InfiniBand: the default of `speechdp launch`.

    mpirun passes `--mca pml ob1` to the ranks as this variable; UCX and libfabric need a different `pml`.
    """
    return os.environ.get("OMPI_MCA_pml") == "ob1"  # noqa: SIM112  Open MPI's spelling


def started_by_horovodrun() -> bool:
    """Return whether to use horovodrun's own rendezvous, which needs no MPI."""
    return "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ


def is_spread_by_horovodrun() -> bool:
    """Return whether horovodrun, with its own rendezvous, has started ranks on several hosts."""
    return int(os.environ.get("HOROVOD_LOCAL_SIZE", "1")) < int(os.environ.get("HOROVOD_SIZE", "1"))


@contextmanager
def set_meanwhile(settings: Mapping[str, str]) -> Iterator[None]:
    """Set variables that a library reads as it starts; restore the previous values after the block."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def torchrun_rendezvous() -> tuple[str, int] | None:
    """Return the address and port torchrun gives its processes, or None under another launcher."""
    launch = announced()
    if launch is None or launch.launcher != "torchrun":
        return None  # a Kubernetes pod has these variables, whatever starts the ranks in it
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    return (host, int(port)) if host and port.isdigit() else None


def torchrun_local_rank() -> int:
    """Return this process's index among those of its host, as torchrun gives it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def chosen_interface() -> str | None:
    """Return the network interface the user chose, e.g. by `launch --interface`; None: none."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0] or None


def prefer_gloo_interface(name: str) -> None:
    """Let gloo communicate over network interface `name`, unless the user chose one."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def flush_output() -> None:
    """Flush stdout and stderr; ignore errors, since they must not keep a process from ending."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()


def wait_until_read(within_s: float = 1.0) -> None:
    """Wait until the launcher has read everything this rank wrote to its pipes.

    Hydra's mpiexec stops reading a rank's output once it learns that the rank aborts the job.

    Args:
        within_s: time after which the reader is considered stuck, s.
    """
    until = time.monotonic() + within_s
    sleep_until(lambda: not any(map(_bytes_in_pipe, (1, 2))) or time.monotonic() > until)


def _bytes_in_pipe(descriptor: int) -> int:
    """Return how many bytes of a pipe are unread; 0 if it is not a pipe, or has no reader left."""
    errors_alone = select.poll()
    errors_alone.register(descriptor, 0)
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode) or errors_alone.poll(0):
            return 0
        (unread,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    except OSError:  # closed
        return 0
    return int(unread)


def gloo_connects_later() -> bool:
    """Return whether the user has set gloo to connect two ranks only when they first exchange."""
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "0").lower() not in {"", "0", "n", "no", "off", "false"}


def has_parent_that_reports() -> bool:
    """Return whether this rank's parent reports how it ends, so that ending the process ends the job.

    Example:
        >>> has_parent_that_reports()
        False
    """
    return os.environ.get(_RANK_PARENT) == str(os.getppid())


def end_process(exit_code: int) -> NoReturn:
    """End this process at once, without exit handlers, which would wait for peers that never answer."""
    flush_output()
    os._exit(exit_code)


def end_process_with(text: str, exit_code: int) -> NoReturn:
    """Write `text` to stderr and end the process, from any thread; wait for no stream's lock or reader."""
    try:  # the process must end even if nothing can be written
        note_reported()
        bounded(lambda: os.write(2, text.encode(errors="replace")), default=0)
    finally:
        os._exit(exit_code)


def wait_to_report(delay_s: float) -> None:
    """Wait for a rank that says why the job ends before this one does; then record that this one says it.

    If another rank of this host has said why, mpirun is about to end this one, which it may do late.

    Args:
        delay_s: time that others have to say it, s.
    """
    if delay_s > 0:
        time.sleep(delay_s)
    if has_reported():
        time.sleep(_ENDED_WITHIN_S)
    note_reported()


def note_reported() -> None:
    """Record, for the ranks of this host, that one of them says why mpirun is about to end the others."""
    mark = _reported_marker()
    if mark is not None:
        bounded(mark.touch, default=None)


def has_reported() -> bool:
    """Return whether a rank of this host has said why the job ends."""
    mark = _reported_marker()
    return mark is not None and bounded(mark.exists, default=False)


def _reported_marker() -> Path | None:
    """Return a path in mpirun's folder for the job, which is deleted with the job; None: no mpirun."""
    folder = os.environ.get("PMIX_SERVER_TMPDIR", "")
    return Path(folder, "speechdp-reported") if folder else None


def _set_defaults(defaults: Mapping[str, str]) -> None:
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
