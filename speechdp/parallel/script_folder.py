"""The run folder of a script: whether a run may start there, its record, its checkpoints (docs/api.md)."""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import platform
import re
import shutil
import socket
import sys
import sysconfig
import uuid
import zipfile
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speechdp.comm import environment
from speechdp.comm.base import Communicator
from speechdp.comm.startup.folder_owner import OwningProcess, owner_of
from speechdp.comm.startup.world import versions
from speechdp.errors import ConfigError, RunError, one_line
from speechdp.files import (
    atomic_path,
    cannot_be_read,
    cannot_be_written,
    hand_over,
    is_of_disk,
    no_memory_to_read,
)
from speechdp.launching.variables import FOLDER, RESUME
from speechdp.ownership.claimant import START_VARIABLE
from speechdp.ownership.owner import OWNER_FILE, FolderOwner
from speechdp.parallel.registry import STRATEGIES
from speechdp.parallel.run_files import RunDirectory
from speechdp.process.notices import warn
from speechdp.timing.gather import write_timing
from speechdp.timing.gpu import gpu_facts
from speechdp.watchdog.shared_disk import why_not_shared

#: Advice for a script that keeps a state in a file of its own, when an experiment runs it several times.
OWN_STATE = (
    "save states in run.folder: compare, sweep and tune give each run a folder of its own, any other file "
    "is shared by all runs"
)
#: Checkpoints kept: one may turn out damaged, or be of a step after which training went wrong.
_KEPT = 2

#: Folders of this process's runs that have not failed: a restarted script clears only those of earlier
#: processes.
_begun_here: set[Path] = set()
_CHECKPOINT = re.compile(r"step-(\d{8,})(?:-(\d+))?")


class ScriptFolder:
    """A run's folder on one rank, or no folder: then nothing is written.

    The job owns it from its first look for checkpoints, or from `begin`, until `release`.

    Args:
        path: the same on all ranks; None: no folder.
        comm: the ranks of the run.

    Attributes:
        run_id: id of the run in the folder, the same on all ranks, once the run has begun; "": none.
    """

    def __init__(self, path: Path | None, comm: Communicator) -> None:
        self.path, self._comm = path, comm
        self.run_id = ""
        self._owner: FolderOwner | None = None
        #: Whether all ranks see the folder; None: unknown yet.
        self._is_shared: bool | None = None
        #: Whether checkpoints were looked for, and whether the run continues from a state.
        self._has_looked, self._resumes = False, False
        #: The record, on the rank that writes it: rank 0, if there is a folder.
        self._record = RunDirectory(path) if path is not None and comm.rank == 0 else None

    def begin(self, facts: dict[str, Any], device: torch.device, *, state_of: str | None) -> Path | None:
        """Write run.json on rank 0; return the path of this rank's timeline.  Collective.

        Args:
            facts: facts about the run, added to those about the machine and the job.
            device: of this rank.
            state_of: id of the run whose state the script has loaded; None: it has loaded none.

        Raises:
            ConfigError: the folder holds a run that must not be touched, or belongs to another job.
            RunError: the folder cannot be written.
        """
        if self.path is None:
            return None
        hosts = self._comm.allgather_object(environment.host_name())
        gpus = self._comm.allgather_object(gpu_facts(device))
        self._acquire()
        self._resumes = state_of is not None
        refusal = self._why_not_resume(state_of) if state_of is not None else self._why_not_begin()
        refusal = self._comm.broadcast_object(refusal)
        if refusal:
            raise ConfigError(refusal)
        if self._record is not None:
            facts = {**facts, **_job_facts(self._comm, device, hosts, gpus)}
            if state_of is None and self._record.is_begun:
                warn(
                    f"{self.path}: the previous run in this folder left no checkpoint, so training starts "
                    "from the beginning"
                )
                self._record.clear()
            versions = [_script_version()]
            if self._record.is_begun:
                versions = list(dict.fromkeys([*self._record.script_versions(), *versions]))
                self._record.forget_end()
                self._record.renew({**facts, "script_versions": versions})
            else:
                self._record.begin({"id": uuid.uuid4().hex, **facts, "script_versions": versions})
            _begun_here.add(self.path.resolve())
        self.run_id = self._comm.broadcast_object("" if self._record is None else self._record.id())
        return self.path / "timeline" / f"rank-{self._comm.rank:04d}.jsonl"

    def _acquire(self) -> None:
        """Take ownership of the folder, on rank 0 for all ranks.  Collective.

        Raises:
            ConfigError: on rank 0, if another job owns the folder, or an earlier run of this process used it.
            RunError: on rank 0, if the folder cannot be written.
        """
        if self._record is not None and self._owner is None:
            folder = self._record.path
            if self.is_set_by_environment and folder.resolve() in _begun_here:
                raise ConfigError(
                    f"{folder}: {FOLDER} names the folder of one run, and this script trains with a second "
                    "DataParallel; make that a script of its own"
                )
            command, process = f"script {Path(sys.argv[0]).name}", OwningProcess(self._comm)
            owner = owner_of(folder, command, warn, process)
            owner.acquire()
            self._owner = owner
        self._comm.barrier()
        self._warn_if_not_shared()

    def _warn_if_not_shared(self) -> None:
        """Warn, once, if a rank does not see the folder: checkpoints need that, training does not."""
        if self._is_shared is not None or self.path is None:
            return
        problem = why_not_shared(self.path, self.path / OWNER_FILE, self._comm, what="it")
        self._is_shared = problem is None
        if problem is not None and self._comm.rank == 0:
            warn(f"{problem}; until then no checkpoint can be saved")

    def release(self) -> None:
        """Give the folder up."""
        if self._owner is not None:
            self._owner.release()
        self._owner = None

    def _why_not_resume(self, state_of: str) -> str | None:
        """Return on rank 0 why a run cannot continue here from another run's state, or None."""
        if self._record is None:
            return None
        if not self._record.is_begun:
            # Runs of an experiment that share a script's own file would silently continue from each other.
            if self.is_set_by_environment and state_of:
                return f"{self._record.path}: the loaded state belongs to another run; {OWN_STATE}"
            return None
        here = self._record.id()
        if here in {"", state_of}:  # earlier versions wrote none
            return None
        return (
            f"{self._record.path}: the loaded state belongs to another run than the one in this folder; "
            "choose another folder, or remove it"
        )

    @property
    def is_set_by_environment(self) -> bool:
        """Whether the environment sets the folder, as it does in runs of an experiment."""
        return bool(os.environ.get(FOLDER))

    def _why_not_begin(self) -> str | None:
        """Return on rank 0 why a run cannot start here, or None."""
        if self._record is None:
            return None
        folder = self._record.path
        is_own = folder.resolve() in _begun_here
        other = f"name another in {FOLDER}" if self.is_set_by_environment else "choose another folder"
        whole = self._whole_checkpoints()
        if whole:
            return (
                f"{folder}: holds checkpoints of a run (the last is {whole[-1].name}), and the script has "
                f"loaded none; call load_checkpoint to continue it, {other}, or remove it"
            )
        # An earlier start of the same job may have failed after its training.
        is_of_job = self._record.launch() == _launch() != ""
        may_clear = not is_own and (is_of_job or not self._record.is_complete)
        is_meant = self._has_looked or os.environ.get(RESUME) == "1"
        if not self._record.is_begun or (is_meant and may_clear):
            return None
        return f"{folder}: already holds a run, without checkpoints; {other}, or remove it"

    def once_removed(self) -> str:
        """Return what to do before a script that has saved nothing can repeat its steps, or ""."""
        may_begin = self._resumes or self._has_looked or os.environ.get(RESUME) == "1"
        if self.path is None or may_begin:
            return ""
        return f", once {self.path} is removed"

    def fail(self) -> None:
        """Release the folder of a run that failed; the run may start again in this process."""
        if self.path is not None:
            _begun_here.discard(self.path.resolve())
        self.release()

    def complete(self, timing: dict[str, Any] | None, step: int) -> None:
        """Write on rank 0 the timing, and that the run ended well."""
        self.record_timing(timing)
        if self._record is not None:
            self._record.complete({"step": step, "host": socket.gethostname()})

    def record_timing(self, timing: dict[str, Any] | None) -> None:
        """Write on rank 0 the timing."""
        if self._record is None or timing is None:
            return
        if all(entry["steps"] > 0 for entry in timing["ranks"]):
            write_timing(self._record.path, timing)

    def add_values(self, values: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl on rank 0."""
        if self._record is not None:
            self._record.add_values(values)

    def resume_after(self, step: int) -> None:
        """Drop records after `step`, because the steps after it are repeated."""
        if self._record is not None:
            self._record.truncate_metrics(step)

    # -- checkpoints ------------------------------------------------------------------------------------

    def write_checkpoint(self, state: dict[str, Any], step: int) -> None:
        """Write every rank's state; rename the folder when all are on disk.  Collective.

        Args:
            state: state of this rank.
            step: rank 0's step names the checkpoint: asynchronous ranks have taken different numbers of
                steps.

        Raises:
            ConfigError: the run has no folder, or the state could not be read back.
            RunError: a rank cannot write.
        """
        folder = self._checkpoints()
        _check_readable(state)
        problem = temporary = None
        if self._record is not None:
            try:
                self._record.sync_metrics()
                temporary = self._new_temporary(folder, step)
            except RunError as error:
                problem = str(error)
            except OSError as error:
                problem = cannot_be_written(folder, error)
        name: str | None = self._comm.broadcast_object(None if temporary is None else temporary.name)
        if name is not None:
            problem = self._write_state(folder / name, state)
        problems = [other for other in self._comm.allgather_object(problem) if other]
        if problems:
            raise RunError(problem or problems[0])
        if temporary is not None:
            self._keep(temporary, step)
        self._comm.barrier()

    def _new_temporary(self, folder: Path, step: int) -> Path:
        """Create the folder that the ranks write to; delete what killed jobs left."""
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("step-*.tmp"):
            shutil.rmtree(left, ignore_errors=True)
        # A new name each time: network file systems cache that a name does not exist.
        temporary = folder / f"step-{step:08d}.{uuid.uuid4().hex[:8]}.tmp"
        temporary.mkdir()
        return temporary

    def _write_state(self, temporary: Path, state: dict[str, Any]) -> str | None:
        """Write this rank's part; return the problem that prevents it, or None."""
        if not temporary.is_dir():
            host = environment.host_name()
            return (
                f"{temporary}: does not exist on {host} (rank {self._comm.rank}); put the run's folder on a "
                "file system that all hosts share"
            )
        try:
            write_tensors(temporary / f"rank-{self._comm.rank:04d}.pt", state)
        except RunError as error:
            return str(error)
        return None

    def _keep(self, temporary: Path, step: int) -> None:
        """Give a checkpoint its name; only then remove older ones, and later ones of an abandoned run."""
        whole = self._whole_checkpoints()
        version = 1 + max((_key(path)[1] for path in whole if _key(path)[0] == step), default=0)
        final = temporary.with_name(f"step-{step:08d}" + (f"-{version}" if version > 1 else ""))
        try:
            hand_over(temporary, final)
        except OSError as error:
            raise RunError(cannot_be_written(final, error)) from error
        before = [path for path in whole if _key(path) < _key(final)]
        for path in whole:
            if path not in before[-(_KEPT - 1) :]:
                shutil.rmtree(path, ignore_errors=True)

    def read_checkpoint(self) -> dict[str, Any] | None:
        """Return this rank's state in the last complete checkpoint; None: there is none.  Collective.

        Raises:
            ConfigError: the run has no folder, or the checkpoint is of another number of ranks.
            RunError: the checkpoint cannot be read.
        """
        folder = self._checkpoints()
        self._acquire()
        self._has_looked = True
        last = [(path.name, len(list(path.glob("rank-*.pt")))) for path in self._whole_checkpoints()[-1:]]
        found = self._comm.broadcast_object(last)
        if not found:
            return None
        name, size = found[0]
        folder = folder / name
        if size != self._comm.size:
            raise ConfigError(
                f"{folder}: was saved on another number of ranks ({size}) than this job has "
                f"({self._comm.size}); start {size}"
            )
        path = folder / f"rank-{self._comm.rank:04d}.pt"
        try:
            _check_sums(path)
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except OSError as error:
            raise RunError(cannot_be_read(path, error)) from error
        except Exception as error:  # whatever zipfile and torch.load find wrong with a file
            if line := no_memory_to_read(path, error):
                raise RunError(line) from error
            message = one_line(error, 80)
            raise RunError(f"{path}: is damaged ({message}); remove {folder}, then run again") from error
        return state

    def _checkpoints(self) -> Path:
        if self.path is None:
            raise ConfigError("checkpoints are written to the run's folder; give DataParallel folder=")
        return self.path / "checkpoints"

    def last_checkpoint_note(self) -> str:
        """Return `; last checkpoint: PATH`, as the end of a message; "": no checkpoint or no folder."""
        whole = [] if self.path is None else self._whole_checkpoints()
        return f"; last checkpoint: {whole[-1]}" if whole else ""

    def _whole_checkpoints(self) -> list[Path]:
        """Return the folders of complete checkpoints, oldest first."""
        found = self._checkpoints().glob("step-*")
        return sorted((path for path in found if _CHECKPOINT.fullmatch(path.name)), key=_key)


def _key(checkpoint: Path) -> tuple[int, int]:
    """Return step and version of a checkpoint's folder: a step may be saved several times."""
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


def _check_sums(path: Path) -> None:
    """Check a file of torch.save against its own checksums, which torch.load does not verify.

    A script may have told torch to write none; then all are 0.

    Raises:
        BadZipFile: a part differs from what was written, or the file is truncated.
        OSError: the file cannot be read.
    """
    with zipfile.ZipFile(path) as archive:
        has_sums = any(part.CRC for part in archive.infolist())
        if has_sums and (part := archive.testzip()) is not None:
            raise zipfile.BadZipFile(f"the checksum of {part} does not match")


def _check_readable(state: dict[str, Any]) -> None:
    """Refuse a state that torch.load(weights_only=True) would not read back.  Raises ConfigError."""
    for part in state.values():
        for name, value in part.items():
            file = io.BytesIO()
            try:
                torch.save(_without_tensors(value), file)
                file.seek(0)
                torch.load(file, weights_only=True)
            except Exception as error:  # whatever torch finds wrong with it
                message = one_line(error)
                kind = next(iter(re.findall(r"GLOBAL ([\w.]+)", message)), type(error).__name__)
                raise ConfigError(
                    f"save_checkpoint: {name} holds a value that cannot be saved ({kind}); give numbers, "
                    "texts, tensors, and lists and dicts of them (float(x), torch.from_numpy(x), str(path))"
                ) from error


def _without_tensors(value: Any) -> Any:
    """Return nested values with tensors, which are always readable, replaced by small numbers."""
    if isinstance(value, Tensor):
        return 0
    if type(value) in (dict, OrderedDict):
        return {_without_tensors(key): _without_tensors(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return [_without_tensors(item) for item in value]
    return value


def write_tensors(path: Path, values: dict[str, Any]) -> None:
    """Write tensors by name, completely or not at all: `.safetensors` as such, others with `torch.save`.

    Raises:
        ConfigError: some values are not tensors, which `.safetensors` cannot hold.
        RunError: the file cannot be written.
    """
    if path.suffix == ".safetensors":
        values = _plain_tensors(path, values)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            if path.suffix == ".safetensors":
                importlib.import_module("safetensors.torch").save_file(values, temporary)
            else:
                # Given a path, torch.save hides the operating system's error.
                with temporary.open("wb") as file:
                    torch.save(values, file)
    except Exception as error:
        if not is_of_disk(error):
            raise
        raise RunError(cannot_be_written(path, error)) from error


def _plain_tensors(path: Path, values: dict[str, Any]) -> dict[str, Tensor]:
    """Return tensors by name in the form safetensors takes, each contiguous.

    Raises:
        ConfigError: a value is not a tensor.
    """
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"{path}: .safetensors holds tensors only, and {name} is of type {type(value).__name__}; "
                f"give another ending, e.g. {path.with_suffix('.pt').name}"
            )
    return {name: value.contiguous() for name, value in values.items()}


def _job_facts(comm: Communicator, device: torch.device, hosts: list[str], gpus: list[Any]) -> dict[str, Any]:
    launch = environment.announced()
    return {
        "backend": comm.backend,
        "device": device.type,
        "size": comm.size,
        "hosts": hosts,
        "gpus": gpus,
        "launcher": None if launch is None else launch.launcher,
        "launch": _launch(),
        "machine": f"{platform.system()} {platform.machine()}",
        "versions": versions(),
        "script": sys.argv[0],
        "command": [Path(sys.executable).name, *sys.argv],
        "directory": str(Path.cwd()),
    }


def _script_version() -> str:
    """Return a checksum of the running script and of the modules it has imported from its folder.

    Returns:
        "": the script is not a file, as when Python reads standard input.
    """
    script = Path(sys.argv[0])
    try:
        found = hashlib.sha256(script.read_bytes())
    except OSError:
        return ""
    for path in _own_modules(script.resolve()):
        with suppress(OSError):  # deleted since it was imported
            found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:12]


def _own_modules(script: Path) -> list[Path]:
    """Return the files of modules imported from a script's folder, sorted, without the script itself.

    Packages installed there, in a virtual environment or with Python itself, are not the script's own;
    neither are speechdp and packages that provide strategies, which may be installed as links to their
    source (`pip install -e`): only runs with such a strategy import them.
    """
    installed = {"speechdp", *STRATEGIES.packages()}
    paths = sysconfig.get_paths()
    libraries = [Path(paths[name]).resolve() for name in ("stdlib", "platstdlib")]
    files = {
        Path(file).resolve()
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in installed
        and isinstance(file := getattr(module, "__file__", None), str)
    }
    return sorted(
        file
        for file in files - {script}
        if file.is_relative_to(script.parent)
        and file.suffix == ".py"
        and not {"site-packages", "dist-packages"}.intersection(file.parts)
        and not any(file.is_relative_to(folder) for folder in libraries)
    )


def _launch() -> str:
    """Return the id of this process's `speechdp launch`, the same in all its starts; "": none."""
    return os.environ.get(START_VARIABLE, "").partition(":")[0]
