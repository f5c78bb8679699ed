"""Read what the launcher announced and set what MPI and Horovod read: the only place in comm/ that does.

Settings are defaults: whatever the user has put into the environment stays as it is.
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

#: which algorithm Open MPI takes for which message size; see the file itself and docs/communicators.md.
ALLREDUCE_RULES = Path(__file__).with_name("openmpi_allreduce.rules")

_OPEN_MPI_DEFAULTS = {
    # A waiting rank gives its core away: a 4 MB allreduce on a full node takes 10 ms instead of 37.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # Open MPI's own choice for large messages is 1.9 times slower than ring over a 1 Gbit link.
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_dynamic_rules_filename": str(ALLREDUCE_RULES),
    # The non-blocking allreduce that is used between hosts: ring.
    "OMPI_MCA_coll_libnbc_iallreduce_algorithm": "1",
    # Over one connection two ranks that send to each other take turns, mostly; over two they do not.
    "OMPI_MCA_btl_tcp_links": "2",
    # libfabric for one-sided exchanges, of which there are none here: to end it takes each job a second.
    "OMPI_MCA_btl": "^ofi",
}

#: The process that waits for a rank of Hydra's and says how it has ended (launching/mpi/rank_process.py).
_RANK_PARENT = "SPEECHDP_RANK_PARENT"

#: `HOROVOD_CYCLE_TIME` where exchanges are rare, and where there are a few in all, ms.
RARE_CYCLE_MS, FEW_CYCLE_MS = 5, 20

_HOROVOD_DEFAULTS = {
    # Fused buffers hold whatever happened to be ready, so the order of summation, and with it the last
    # bit, would differ from run to run and `--resume` could not be bitwise.  Our buffers are flat anyway.
    "HOROVOD_FUSION_THRESHOLD": "0",
    # Pause of Horovod's background thread between two looks for work, ms; docs/communicators.md has the
    # measurement.
    "HOROVOD_CYCLE_TIME": "1",
    # A peer that answers nothing at all for so long is taken for dead; Gloo only.
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "120",
    # A rank may spend minutes in an evaluation the others wait for; a warning is due only after that.
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "300",
    # Its warnings about exchanges that end the job are repeated by our own one-line messages.
    "HOROVOD_LOG_LEVEL": "error",
}


@dataclass(frozen=True)
class Launch:
    """What the launcher said about this process.

    Attributes:
        launcher: `mpirun`, `horovodrun`, `srun`, `torchrun` or `PMI`.
        rank: this process' index among those started.
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


#: Variables by which ranks of srun can be connected: of PMIx, Cray's PMI, and Intel MPI.
_CONNECTED_BY_SRUN = ("PMIX_NAMESPACE", "PMI_CONTROL_PORT", "I_MPI_PMI_LIBRARY")


def announced(environ: Mapping[str, str] | None = None) -> Launch | None:
    """Return what a launcher announced, or None when nothing started this process but a shell."""
    environ = os.environ if environ is None else environ
    for launcher, rank, size in _LAUNCHERS:
        if launcher == "torchrun" and "MASTER_ADDR" not in environ:
            continue  # RANK alone is a word others use too
        if launcher in ("PMI", "srun") and environ.get("SLURM_PTY_PORT") and environ.get(size) == "1":
            continue  # the shell of salloc, which may be a step of one task, or one of srun --pty
        if environ.get(rank, "").isdigit() and environ.get(size, "").isdigit():
            return Launch(launcher, int(environ[rank]), int(environ[size]))
    return None


def started_unconnected() -> Launch | None:
    """Return the launch of an srun without PMIx, whose processes MPI cannot connect; else None.

    Open MPI 4 would end each of them with a page of text, Open MPI 5 let each train by itself.  Cray's MPI
    has a channel of its own, and so has Intel's that is told where Slurm's library is.
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
    """Set Open MPI's defaults.  To be called before MPI is initialised, harmless under another MPI."""
    _set_defaults(_OPEN_MPI_DEFAULTS)
    prefix = Path(sys.prefix)
    if "OPAL_PREFIX" not in os.environ and (prefix / "bin" / "orted").exists():
        # The wheel was built for another prefix.  mpirun tells its children; a single process has nobody.
        os.environ["OPAL_PREFIX"] = str(prefix)
    if announced() is None:
        # A process by itself launches nothing; without this, Open MPI 4 wants ssh even then.
        _set_defaults({"OMPI_MCA_plm": "isolated"})


def prepare_horovod() -> None:
    """Set Horovod's defaults and, as it may run over MPI, Open MPI's.  To be called before `hvd.init`."""
    prepare_open_mpi()
    _set_defaults(_HOROVOD_DEFAULTS)


def fault_tolerance_on() -> bool:
    """Return whether Open MPI 5 lets a job go on without ranks that are gone (mpirun --with-ft ulfm)."""
    value = os.environ.get("OMPI_MCA_mpi_ft_enable", "")  # noqa: SIM112  Open MPI's spelling
    return value.lower() in {"1", "true", "yes"}


def expect_rare_exchanges(cycle_ms: int = RARE_CYCLE_MS) -> None:
    """Let Horovod look for work less often: its looks cost a few per cent of a rank that has none, or more.

    For strategies that do not exchange at every step, and for what is no training; an exchange then waits
    half of `cycle_ms` more in the mean.  To be called before the communicator is made; whatever the user has
    set stays.
    """
    os.environ.setdefault("HOROVOD_CYCLE_TIME", str(cycle_ms))


def horovod_controller() -> str | None:
    """Return what the user or horovodrun has chosen for Horovod (`gloo` or `mpi`), None if nothing."""
    for name in ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"):
        if os.environ.get(name):
            return os.environ[name].lower()
    return None


def mpi_is_held_to_tcp() -> bool:
    """Return whether Open MPI was told to use no InfiniBand, as `speechdp launch` does by default.

    mpirun hands `--mca pml ob1` to the ranks as this variable; UCX and libfabric would need another `pml`.
    """
    return os.environ.get("OMPI_MCA_pml") == "ob1"  # noqa: SIM112  Open MPI's spelling


def started_by_horovodrun() -> bool:
    """Return whether horovodrun's own rendezvous is to be used, which needs no MPI."""
    return "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ


def is_spread_by_horovodrun() -> bool:
    """Return whether horovodrun, whose own rendezvous is used, has started ranks on several hosts."""
    return int(os.environ.get("HOROVOD_LOCAL_SIZE", "1")) < int(os.environ.get("HOROVOD_SIZE", "1"))


@contextmanager
def set_meanwhile(settings: Mapping[str, str]) -> Iterator[None]:
    """Set variables that a library reads while it starts, and take them away again."""
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
        return None  # a pod of Kubernetes' has these variables, whatever starts the ranks there
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    return (host, int(port)) if host and port.isdigit() else None


def torchrun_local_rank() -> int:
    """Return the index among the processes of this host that torchrun gives."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def chosen_interface() -> str | None:
    """Return the network interface the user has chosen, as by `launch --interface`; None: none."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0] or None


def prefer_gloo_interface(name: str) -> None:
    """Let gloo talk over network interface `name`, unless the user chose one."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def flush_output() -> None:
    """Write out what was printed; nothing that ends a process may fail over it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()


def wait_until_heard(within_s: float = 1.0) -> None:
    """Wait until the launcher has read all that was written to it through pipes.

    Hydra's mpiexec reads no more of what a rank has said once it hears that the rank aborts the job.

    Args:
        within_s: then whoever reads is taken for stuck, s.
    """
    until = time.monotonic() + within_s
    sleep_until(lambda: not any(map(_bytes_in_pipe, (1, 2))) or time.monotonic() > until)


def _bytes_in_pipe(descriptor: int) -> int:
    """Return how many bytes nobody has read yet; 0 where it is no pipe, or nobody is left who reads it."""
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
    """Return whether the user lets gloo connect two ranks only when they first exchange something."""
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "0").lower() not in {"", "0", "n", "no", "off", "false"}


def has_parent_that_tells() -> bool:
    """Tell whether the parent of this rank says how it ends, so that it ends the job by leaving.

    Example:
        >>> has_parent_that_tells()
        False
    """
    return os.environ.get(_RANK_PARENT) == str(os.getppid())


def end_process(exit_code: int) -> NoReturn:
    """Leave at once: no exit handlers, which would wait for peers that are never going to answer."""
    flush_output()
    os._exit(exit_code)


def end_process_with(text: str, exit_code: int) -> NoReturn:
    """Write `text` to stderr and leave, from any thread: no stream's lock is waited for, nor a reader."""
    try:  # where nothing can be said, leaving counts all the same
        note_told()
        bounded(lambda: os.write(2, text.encode(errors="replace")), default=0)
    finally:
        os._exit(exit_code)


def note_told() -> None:
    """Note for the ranks of this host that one of them says why mpirun is about to end the others."""
    mark = _mark_of_told()
    if mark is not None:
        bounded(mark.touch, default=None)


def has_told() -> bool:
    """Tell whether a rank of this host has said why the job ends."""
    mark = _mark_of_told()
    return mark is not None and bounded(mark.exists, default=False)


def _mark_of_told() -> Path | None:
    """Return the name of a file in mpirun's own folder for the job, which goes with it; None: no mpirun."""
    folder = os.environ.get("PMIX_SERVER_TMPDIR", "")
    return Path(folder, "speechdp-told") if folder else None


def _set_defaults(defaults: Mapping[str, str]) -> None:
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
