"""The run folder of a script: whether a run may begin there, its record, its checkpoints (docs/api.md)."""

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
    is_of_disk,
    no_memory_to_read,
)
from speechdp.launching.variables import FOLDER, RESUME
from speechdp.ownership.claimant import START_VARIABLE
from speechdp.ownership.owner import OWNER_FILE, FolderOwner
from speechdp.parallel.run_files import RunDirectory
from speechdp.process.notices import warn
from speechdp.timing.gather import write_timing
from speechdp.timing.gpu import gpu_facts
from speechdp.watchdog.shared_disk import why_not_shared

#: What to do with a state in a file of the script's, where an experiment runs the script several times.
OWN_STATE = (
    "save states in run.folder: compare, sweep and tune give each run a folder of its own, any other file "
    "is shared by all runs"
)
#: Checkpoints kept: one may be found damaged, or be of a step after which all went wrong.
_KEPT = 2

#: Folders of this process's runs that have not failed: a restarted script clears those of earlier ones only.
_begun_here: set[Path] = set()
_CHECKPOINT = re.compile(r"step-(\d{8,})(?:-(\d+))?")


class ScriptFolder:
    """A run's folder on one rank, or none: then nothing is written.

    It belongs to this job from the first look at its checkpoints, or from `begin`, until `release`.

    Args:
        path: the same on all ranks; None: no folder.
        comm: the ranks of the run.

    Attributes:
        run_id: of the run in the folder, the same on all ranks, once it has begun; "": none.
    """

    def __init__(self, path: Path | None, comm: Communicator) -> None:
        self.path, self._comm = path, comm
        self.run_id = ""
        self._owner: FolderOwner | None = None
        #: Whether all ranks see it; None: that is not known yet.
        self._is_shared: bool | None = None
        #: Whether checkpoints were looked for, and whether the run goes on from a state.
        self._has_looked, self._goes_on = False, False
        #: Where this rank writes the record: rank 0, if there is a folder.
        self._record = RunDirectory(path) if path is not None and comm.rank == 0 else None

    def begin(self, facts: dict[str, Any], device: torch.device, *, state_of: str | None) -> Path | None:
        """Write run.json on rank 0; return the path of this rank's timeline.  Collective.

        Args:
            facts: on the run, beside those on the machine and the job.
            device: of this rank.
            state_of: id of the run whose state the script has loaded; None: it has loaded none.

        Raises:
            ConfigError: the folder holds a run that is not to be touched, or belongs to another job.
            RunError: it cannot be written.
        """
        if self.path is None:
            return None
        hosts = self._comm.allgather_object(environment.host_name())
        gpus = self._comm.allgather_object(gpu_facts(device))
        self._acquire()
        self._goes_on = state_of is not None
        refusal = self._why_not_go_on(state_of) if state_of is not None else self._why_not_begin()
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
        """Own the folder, on rank 0 for all.  Collective.

        Raises:
            ConfigError: on rank 0, another job owns it, or an earlier run of this script has been there.
            RunError: on rank 0, it cannot be written.
        """
        if self._record is not None and self._owner is None:
            folder = self._record.path
            if self.is_told and folder.resolve() in _begun_here:
                raise ConfigError(
                    f"{folder}: {FOLDER} names the folder of one run, and this script trains with a second "
                    "DataParallel; make that a script of its own"
                )
            command, process = f"script {Path(sys.argv[0]).name}", OwningProcess(self._comm)
            owner = owner_of(folder, command, warn, process)
            owner.acquire()
            self._owner = owner
        self._comm.barrier()
        self._tell_whether_shared()

    def _tell_whether_shared(self) -> None:
        """Warn, once, where a rank does not see the folder: checkpoints need it, training does not."""
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

    def _why_not_go_on(self, state_of: str) -> str | None:
        """Return on rank 0 why a run cannot go on here from another's state, or None."""
        if self._record is None:
            return None
        if not self._record.is_begun:
            # Runs of an experiment that share a file of the script's would go on from one another, unseen.
            if self.is_told and state_of:
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
    def is_told(self) -> bool:
        """Whether the environment names the folder, as it does in runs of an experiment."""
        return bool(os.environ.get(FOLDER))

    def _why_not_begin(self) -> str | None:
        """Return on rank 0 why a run cannot begin here, or None."""
        if self._record is None:
            return None
        folder = self._record.path
        is_own = folder.resolve() in _begun_here
        other = f"name another in {FOLDER}" if self.is_told else "choose another folder"
        whole = self._whole_checkpoints()
        if whole:
            return (
                f"{folder}: holds checkpoints of a run (the last is {whole[-1].name}), and the script has "
                f"loaded none; call load_checkpoint to continue it, {other}, or remove it"
            )
        # An earlier start of the same job may have failed in what follows the training.
        is_of_job = self._record.launch() == _launch() != ""
        may_clear = not is_own and (is_of_job or not self._record.is_complete)
        is_meant = self._has_looked or os.environ.get(RESUME) == "1"
        if not self._record.is_begun or (is_meant and may_clear):
            return None
        return f"{folder}: already holds a run, without checkpoints; {other}, or remove it"

    def once_removed(self) -> str:
        """Return what must be done before a script that has saved nothing can take its steps again, or ""."""
        may_begin = self._goes_on or self._has_looked or os.environ.get(RESUME) == "1"
        if self.path is None or may_begin:
            return ""
        return f", once {self.path} is removed"

    def fail(self) -> None:
        """Note that the run has failed, and may begin anew in this process."""
        if self.path is not None:
            _begun_here.discard(self.path.resolve())
        self.release()

    def complete(self, timing: dict[str, Any] | None, step: int) -> None:
        """Write on rank 0 what was timed, and that the run has ended well."""
        self.record_timing(timing)
        if self._record is not None:
            self._record.complete({"step": step, "host": socket.gethostname()})

    def record_timing(self, timing: dict[str, Any] | None) -> None:
        """Write on rank 0 what was timed."""
        if self._record is None or timing is None:
            return
        if all(entry["steps"] > 0 for entry in timing["ranks"]):
            write_timing(self._record.path, timing)

    def add_values(self, values: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl on rank 0."""
        if self._record is not None:
            self._record.add_values(values)

    def go_on_after(self, step: int) -> None:
        """Drop what was recorded after a step, which is taken again."""
        if self._record is not None:
            self._record.truncate_metrics(step)

    # -- checkpoints ------------------------------------------------------------------------------------

    def write_checkpoint(self, state: dict[str, Any], step: int) -> None:
        """Write every rank's state; the folder gets its name when all are on disk.  Collective.

        Args:
            state: of this rank.
            step: rank 0's names the checkpoint: asynchronous ranks have taken other numbers of steps.

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
        """Make the folder that the ranks write to; what jobs that were killed have left goes."""
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("step-*.tmp"):
            shutil.rmtree(left, ignore_errors=True)
        # A name that nobody has looked for: network disks remember what is not there.
        temporary = folder / f"step-{step:08d}.{uuid.uuid4().hex[:8]}.tmp"
        temporary.mkdir()
        return temporary

    def _write_state(self, temporary: Path, state: dict[str, Any]) -> str | None:
        """Write this rank's part; return what keeps it from doing so."""
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
        """Give a checkpoint its name; only then remove older ones, and later ones of a run that was left."""
        whole = self._whole_checkpoints()
        version = 1 + max((_key(path)[1] for path in whole if _key(path)[0] == step), default=0)
        final = temporary.with_name(f"step-{step:08d}" + (f"-{version}" if version > 1 else ""))
        try:
            temporary.rename(final)
        except OSError as error:
            raise RunError(cannot_be_written(final, error)) from error
        before = [path for path in whole if _key(path) < _key(final)]
        for path in whole:
            if path not in before[-(_KEPT - 1) :]:
                shutil.rmtree(path, ignore_errors=True)

    def read_checkpoint(self) -> dict[str, Any] | None:
        """Return this rank's state of the last whole checkpoint; None: there is none.  Collective.

        Raises:
            ConfigError: the run has no folder, or the checkpoint is of another number of ranks.
            RunError: it cannot be read.
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
        except Exception as error:  # whatever zipfile and torch.load find wrong in a file
            if line := no_memory_to_read(path, error):
                raise RunError(line) from error
            said = one_line(error, 80)
            raise RunError(f"{path}: is damaged ({said}); remove {folder}, then run again") from error
        return state

    def _checkpoints(self) -> Path:
        if self.path is None:
            raise ConfigError("checkpoints are written to the run's folder; give DataParallel folder=")
        return self.path / "checkpoints"

    def last_checkpoint_note(self) -> str:
        """Return `; last checkpoint: PATH`, to end a message; "": there is none, or no folder."""
        whole = [] if self.path is None else self._whole_checkpoints()
        return f"; last checkpoint: {whole[-1]}" if whole else ""

    def _whole_checkpoints(self) -> list[Path]:
        """Return the folders of whole checkpoints, the last one last."""
        found = self._checkpoints().glob("step-*")
        return sorted((path for path in found if _CHECKPOINT.fullmatch(path.name)), key=_key)


def _key(checkpoint: Path) -> tuple[int, int]:
    """Return step and version of a checkpoint's folder: one step may be saved several times."""
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


def _check_sums(path: Path) -> None:
    """Hold what torch.save has written against its own checksums, which torch.load reads past.

    A script may have told torch to write none: then all are 0.

    Raises:
        BadZipFile: a part is not what was written, or the file is cut short.
        OSError: it cannot be read.
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
            except Exception as error:  # whatever torch finds wrong in it
                said = one_line(error)
                kind = next(iter(re.findall(r"GLOBAL ([\w.]+)", said)), type(error).__name__)
                raise ConfigError(
                    f"save_checkpoint: {name} holds a value that cannot be saved ({kind}); give numbers, "
                    "texts, tensors, and lists and dicts of them (float(x), torch.from_numpy(x), str(path))"
                ) from error


def _without_tensors(value: Any) -> Any:
    """Return nested values with small numbers in place of tensors, which are readable anyway."""
    if isinstance(value, Tensor):
        return 0
    if type(value) in (dict, OrderedDict):
        return {_without_tensors(key): _without_tensors(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return [_without_tensors(item) for item in value]
    return value


def write_tensors(path: Path, values: dict[str, Any]) -> None:
    """Write tensors by name, whole or not at all: `.safetensors` as such, anything else by `torch.save`.

    Raises:
        ConfigError: `.safetensors` cannot hold them, as not all are tensors.
        RunError: it cannot be written.
    """
    if path.suffix == ".safetensors":
        values = _plain_tensors(path, values)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            if path.suffix == ".safetensors":
                importlib.import_module("safetensors.torch").save_file(values, temporary)
            else:
                # Given a path, torch.save does not say what the disk said.
                with temporary.open("wb") as file:
                    torch.save(values, file)
    except Exception as error:
        if not is_of_disk(error):
            raise
        raise RunError(cannot_be_written(path, error)) from error


def _plain_tensors(path: Path, values: dict[str, Any]) -> dict[str, Tensor]:
    """Return tensors by name as safetensors takes them, each contiguous.

    Raises:
        ConfigError: one is no tensor.
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
    """Return a checksum of the script that runs and of the modules that it has imported from its folder.

    Returns:
        "": it is no file, as where Python reads standard input.
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
    """Return the files of modules that have been imported from a script's folder, in order, without itself.

    What is installed there, in a virtual environment or with Python itself, is not the script's own, and
    neither is speechdp.
    """
    paths = sysconfig.get_paths()
    libraries = [Path(paths[name]).resolve() for name in ("stdlib", "platstdlib")]
    files = {
        Path(file).resolve()
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] != "speechdp" and isinstance(file := getattr(module, "__file__", None), str)
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
    """Return what names the `speechdp launch` of this process, the same in all its starts; "": none."""
    return os.environ.get(START_VARIABLE, "").partition(":")[0]
