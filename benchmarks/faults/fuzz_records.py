"""Readers of models, checkpoints and records of runs, and of what hostfiles and batch systems say."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from hypothesis import strategies as st

from benchmarks.faults.fuzz_files import Change, Files, Reader, changing, content_of
from benchmarks.faults.fuzz_inputs import damaged, other_json
from speechdp.checkpoint.state import load_checkpoint
from speechdp.comm.serial import SerialCommunicator
from speechdp.experiments.race.record import read_race
from speechdp.experiments.race.shown import ShownRaces
from speechdp.experiments.tune.record import read_tune
from speechdp.launching.allocation import find_allocation
from speechdp.launching.hostfile import read_hostfile
from speechdp.models.lstm_am import LstmAcousticModel, LstmConfig
from speechdp.report.runs.derived import sweep_figures
from speechdp.report.runs.folders import read_sweep
from speechdp.report.sweep.answer import find_answer
from speechdp.report.tune.answer import find_answer as find_search_answer
from speechdp.report.tune.search import Search
from speechdp.report.tune.tables import csv_of as csv_of_search
from speechdp.report.tune.tables import make_table
from speechdp.tasks.model_file import ClassCounts, load_model, save_model
from tests.helpers.races import made_up_race, write_made_up_race
from tests.helpers.runs import MadeUpRun, write_run

_SPEEDS = {"one-rank": 0.7, "gradient_averaging": 1.0, "period 4": 1.2}
_ALONE = SerialCommunicator()


def model_readers(scratch: Path) -> list[Reader]:
    """Return the readers of models and checkpoints, damaged parts also with a checksum that fits."""
    run = scratch / "run"
    run.mkdir()
    torch.manual_seed(0)
    counts = ClassCounts(np.array([10, 0, 40, 5]), np.array([2, 0, 4, 5]))
    save_model(
        run, LstmAcousticModel(6, 4, LstmConfig(1, 3, False)), counts, {"feature_dim": 6, "num_classes": 4}
    )
    model = {"model.safetensors": (run / "model.safetensors").read_bytes()}
    folder = "checkpoints/step-00000012"
    head, part = f"{folder}/checkpoint.json", f"{folder}/rank-0000.safetensors"
    tensors = {"parameters": torch.arange(5.0), "random.cpu": torch.zeros(3, dtype=torch.uint8)}
    saved = safetensors.torch.save(tensors, {"state": json.dumps({"counters": {"step": 12}, "rank": 0})})
    checkpoint = _checkpoint(saved, head, part)

    def sealed(content: bytes) -> Files:
        return _checkpoint(content, head, part)

    def read_checkpoint(changed: Path) -> None:
        load_checkpoint(changed, _ALONE, [])

    inputs = st.one_of(
        damaged(checkpoint[head]).map(lambda new: {head: new}),
        other_json(checkpoint[head]).map(lambda new: {head: new}),
        damaged(checkpoint[part]).map(sealed),
        _other_safetensors(checkpoint[part]).map(sealed),
    )
    return [
        changing(
            "model", lambda f: load_model(f, torch.device("cpu")), model,
            ("model.safetensors", damaged), ("model.safetensors", _other_safetensors),
        ),
        Reader("checkpoint", read_checkpoint, checkpoint, inputs),
    ]  # fmt: skip


def _checkpoint(part_content: bytes, head: str, part: str) -> Files:
    checksum = hashlib.sha256(part_content).hexdigest()
    entry = {"file": Path(part).name, "sha256": checksum, "bytes": len(part_content)}
    values = {"format": "speechdp-checkpoint", "version": 1, "step": 12, "ranks": [entry]}
    return {head: json.dumps(values).encode(), part: part_content}


def _other_safetensors(content: bytes) -> st.SearchStrategy[bytes]:
    """Draw a safetensors file of another head, JSON as it should be: other types, shapes and places."""
    length = int.from_bytes(content[:8], "little")
    head, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    ((key, text),) = head["__metadata__"].items()

    def joined(new_head: bytes) -> bytes:
        return len(new_head).to_bytes(8, "little") + new_head + body

    def with_text(new_text: bytes) -> bytes:
        return joined(json.dumps({**head, "__metadata__": {key: new_text.decode()}}).encode())

    return other_json(json.dumps(head).encode()).map(joined) | other_json(text.encode()).map(with_text)


def launch_readers() -> list[Reader]:
    """Return the readers of hostfiles, and of the variables and files of batch systems."""
    hostfile = b"# two\nnode01 slots=2\nnode02.cluster slots=4 # fast\n\n10.0.0.3 slots=1\n"
    nodes = {"sge": b"n01 4 q1@n01 UNDEFINED\nn02 4 q1@n02 UNDEFINED\n"}
    environments: dict[str, dict[str, str]] = {
        "slurm": {
            "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3,7],a[1-2]-b", "SLURM_TASKS_PER_NODE": "2(x5),1",
        },
        "lsf": {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "batch1 1 n01 4 n02 4"},
        "lsf hosts": {"LSB_JOBID": "7", "LSB_HOSTS": "n01 n01 n02"},
        "pbs": {"PBS_JOBID": "7.server", "PBS_NODEFILE": "{nodes}"},
        "sge": {"JOB_ID": "7", "PE_HOSTFILE": "{nodes}", "SGE_TASK_ID": "3"},
    }  # fmt: skip

    def read(folder: Path) -> None:
        for line in (folder / "environments").read_text("utf-8", "surrogateescape").split("\n"):
            words = [word.partition("=") for word in line.split("\t")]
            environ = {name: value.replace("{nodes}", str(folder / "nodes")) for name, _, value in words}
            find_allocation(environ)

    readers = [
        changing("hostfile", lambda f: read_hostfile(f / "hosts"), {"hosts": hostfile}, ("hosts", damaged))
    ]
    for name, variables in environments.items():
        text = "\t".join(f"{key}={value}" for key, value in variables.items()).encode()
        files = {"environments": text, "nodes": nodes.get(name, b"n01\nn01\nn02\n")}
        changes = [(file, damaged) for file in files if file == "environments" or b"{nodes}" in text]
        readers.append(changing(f"allocation, {name}", read, files, *changes))
    return readers


def run_readers(scratch: Path) -> list[Reader]:
    """Return the readers of a folder of runs, for pages and tables."""
    data = {"stages_s": {"read": 0.1}, "read_bytes": 100, "frames": 10, "threads": 1, "storage": "contiguous"}
    run = MadeUpRun("a", num_evaluations=3, data=data, feeders=[{"rank": 2, "host": "n", "data": data}])
    files = content_of(write_run(run, scratch / "runs"))
    steps = [{"step": n, "frames": 10, "wall": 0.1, "spans": [["forward", 0.0, 0.1]]} for n in range(7)]
    events = [{"event": "eval", "wall": 0.2, "begin": 0.1}]
    head = {"kind": "cpu", "hz": 10, "host": "n", "ranks": {"0": 17}, "gpus": [], "gpu_of_rank": {}}
    rows = [{"t_s": n / 10, "ranks": [[0, 50.0, 1e6]], "gpus": []} for n in range(3)]
    files["timeline/rank-0000.jsonl"] = _lines([*steps, *events])
    files["timeline/samples-n.jsonl"] = _lines([head, *rows])
    untimed = {name: content for name, content in files.items() if name != "timing.json"}

    def read(folder: Path) -> None:
        rows = sweep_figures(read_sweep(folder), None)
        find_answer(rows)

    def changes(present: Files) -> list[tuple[str, Change]]:
        return [(name, change) for name in present for change in (damaged, other_json, other_json)]

    sound = write_made_up_race(scratch, made_up_race(_SPEEDS, rounds=6))
    race = {"race/ranks-2.json": sound.read_bytes()}

    def read_the_race(folder: Path) -> None:
        found = read_race(folder / "race" / "ranks-2.json")
        shown = ShownRaces({found.plan.ranks: found})
        speeds = shown.speeds(found.plan.ranks)
        assert all(speed.ratio > 0 for speed in speeds.values())
        labels = {found.plan.ranks: {name: name for name in speeds}}
        assert len(shown.notes(labels)) == bool(speeds) and isinstance(shown.cautions(labels), tuple)

    search = {"tune.json": _search_record()}

    def read_the_search(folder: Path) -> None:
        found = Search(read_tune(folder), {})
        assert find_search_answer(found).headline
        assert len(make_table(found, {}).cells()) == len(found.record.tried)
        assert csv_of_search(found.record)

    return [
        changing("search record", read_the_search, search, *changes(search)),
        changing("race record", read_the_race, race, *changes(race)),
        changing("run records", read, files, *changes(files)),
        changing("run records, untimed", read, untimed, *changes(untimed)),
    ]


def _search_record() -> bytes:
    """Return a tune.json as a search leaves it."""
    speeds = {"predicted": 90.0, "predicted_low": 80.0, "predicted_high": 99.0,
              "ratio": 1.1, "ratio_low": 1.0, "ratio_high": 1.2,
              "frames_per_s": 99.0, "steps_per_s": 9.0}  # fmt: skip
    ended = {"rungs": 2, "runs": {"1": "a-seed1"}, "times_s": [10.0, None], "scores": [-1.0, -1.1]}
    tried = [
        {"name": "gradient_averaging", "strategy": "gradient_averaging", "batch_size": 0, **speeds, **ended},
        {"name": "bmuf", "strategy": "bmuf", "out_in": "predict", "why": "slower", "runs": {}, **speeds},
    ]
    rungs = [
        {
            "seconds": 10.0,
            "settings": ["gradient_averaging"],
            "scores": {"gradient_averaging": -1.0},
            "expected": {"gradient_averaging": -0.9},
        }
    ]
    content = {
        "format": "speechdp-tune", "version": 1, "settings": {"data": "x"}, "stage": "halving",
        "spent_s": 20.0, "start_s": 4.0, "completed": True,
        "backends": [{"name": "mpi", "speed": 90.0, "why": ""}],
        "tried": tried, "rungs": rungs, "target": -1.2, "chosen": "gradient_averaging", "untold": [],
        "command": "speechdp launch",
    }  # fmt: skip
    return json.dumps(content).encode()


def _lines(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()
