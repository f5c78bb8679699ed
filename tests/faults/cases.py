"""The commands whose files are made to fail: what they are given, and what they leave."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from tests.faults.fork_server import ForkServer, ranks
from tests.faults.points import Operation, Point
from tests.faults.results import Result, files, run_result, sweep_result, tune_result
from tests.faults.verdict import summary
from tests.helpers.corpora import digit_folder
from tests.helpers.tiny_data import TINY_MODEL, TinySizes, write_tiny_data

#: Two epochs of two ranks: four steps each, a checkpoint in the middle and at the end.
_TRAIN = (*TINY_MODEL, "--batch-size", "4", "--epochs", "2", "--checkpoint-steps", "2")
_SHORT = (*TINY_MODEL, "--batch-size", "4", "--epochs", "1", "--backend", "torch")

Start = Literal["forked", "launching", "launched"]


def _nothing(folder: Path) -> None:
    return None


@dataclass(frozen=True)
class Case:
    """A command to try.

    Attributes:
        name: what records call it.
        size: ranks.
        arguments: of the command, given the folder it works in, which is what is watched.
        result: reads what it has left in that folder.
        again: options it is repeated with when a fault has ended it.
        set_up: puts into the folder what it needs there.
        start: forked from the server, and perhaps launching jobs of its own; or by `speechdp launch`.
        page: where it may name what it could not read, and show the rest.
        child: the operations meant are those of rank 0 of the jobs it launches.
    """

    name: str
    size: int
    arguments: Callable[[Path], Sequence[str]]
    result: Callable[[Path], Result]
    again: tuple[str, ...] = ()
    set_up: Callable[[Path], None] = _nothing
    start: Start = "forked"
    page: str = ""
    child: bool = False


class Cases:
    """All cases, on inputs in a folder that are made when they are needed first.

    Args:
        server: makes them.
        folder: where they are.
    """

    def __init__(self, server: ForkServer, folder: Path) -> None:
        self._server, self._folder = server, folder
        self.data = folder / "data"
        write_tiny_data(self.data, TinySizes(train=24, dev=4, test=4))

    def names(self) -> list[str]:
        """Return the names of the cases."""
        return [*_MAKERS]

    def make(self, name: str) -> Case:
        """Return a case."""
        return _MAKERS[name](self, name)

    # --- inputs ---

    def done(self, name: str, arguments: Callable[[Path], Sequence[str]], size: int) -> Path:
        """Return a folder in which a command has done its work."""
        place = self._folder / name
        if not place.is_dir():
            place.mkdir()
            end = self._server.run(ranks(size, list(arguments(place)), {}), self._folder / f"{name}-output")
            assert end.is_well, summary(end)
        return place

    def half_done(self, case: Case) -> Path:
        """Return a folder in which a training has been ended between two checkpoints."""
        place = self._folder / f"{case.name}-half"
        if not place.is_dir():
            place.mkdir()
            point = Point(Operation(0, "create", "RUN/metrics.jsonl", 2), "EIO")
            orders = {0: point.order(place, self._folder / f"{case.name}-half-log")}
            output = self._folder / f"{case.name}-half-output"
            end = self._server.run(ranks(case.size, list(case.arguments(place)), orders), output)
            assert not end.is_well, summary(end)
        return place


def _train(size: int, *options: str, start: Start = "forked") -> Callable[[Cases, str], Case]:
    def make(cases: Cases, name: str) -> Case:
        def arguments(folder: Path) -> list[str]:
            return ["train", str(cases.data), str(folder / "RUN"), *_TRAIN, *options]

        return Case(
            name, size, arguments, lambda folder: run_result(folder / "RUN"), ("--resume",), start=start
        )

    return make


def _resume(of: str) -> Callable[[Cases, str], Case]:
    def make(cases: Cases, name: str) -> Case:
        whole = cases.make(of)
        half = cases.half_done(whole)

        def arguments(folder: Path) -> list[str]:
            return [*whole.arguments(folder), "--resume"]

        return Case(name, whole.size, arguments, whole.result, (), _copying(half))

    return make


def _copying(place: Path) -> Callable[[Path], None]:
    return lambda folder: shutil.copytree(place, folder, dirs_exist_ok=True) and None


def _prepare(*options: str) -> Callable[[Cases, str], Case]:
    def make(cases: Cases, name: str) -> Case:
        source: list[str] = []
        if "--synthetic" not in options:
            audio = cases.data.with_name("audio")
            if not audio.is_dir():
                digit_folder(audio, num_indices=3)
            source = [str(audio)]

        def arguments(folder: Path) -> list[str]:
            return ["prepare", *source, str(folder / "DATA"), *options]

        return Case(name, 1, arguments, partial(_files_of, "DATA"))

    return make


def _shard(cases: Cases, name: str) -> Case:
    def arguments(folder: Path) -> list[str]:
        return ["shard", str(cases.data), str(folder / "OUT"), "--shards", "2"]

    return Case(name, 1, arguments, partial(_files_of, "OUT"))


def _of_a_run(command: str) -> Callable[[Cases, str], Case]:
    def make(cases: Cases, name: str) -> Case:
        whole = cases.done("trained", cases.make("train").arguments, 2)
        data = [str(cases.data)] if command == "decode" else []

        def arguments(folder: Path) -> list[str]:
            return [command, str(folder / "RUN"), *data]

        page = "RUN/report/report.html" if command == "report" else ""
        result = partial(_files_of, "RUN")
        return Case(name, 1, arguments, result, (), _copying(whole), page=page)

    return make


def _files_of(name: str, folder: Path) -> Result:
    return files(folder / name)


def _sweep(cases: Cases, name: str) -> Case:
    def arguments(folder: Path) -> list[str]:
        sizes = ["--periods", "2", "--one-rank-steps", "2", "--decode-split", "test", "--race", "0"]
        return ["sweep", str(cases.data), str(folder / "OUT"), *sizes, *_SHORT]

    return Case(name, 2, arguments, lambda folder: sweep_result(folder / "OUT", "sweep.json"))


def _compare(child: bool) -> Callable[[Cases, str], Case]:
    def make(cases: Cases, name: str) -> Case:
        def arguments(folder: Path) -> list[str]:
            plan = [
                "--strategies",
                "gradient_averaging",
                "--ranks",
                "2",
                "--modes",
                "frames",
                "--decode-split",
                "",
            ]
            return ["compare", str(cases.data), str(folder / "OUT"), *plan, *_SHORT]

        def result(folder: Path) -> Result:
            return sweep_result(folder / "OUT", "compare.json")

        return Case(name, 1, arguments, result, start="launching", child=child)

    return make


def _tune(cases: Cases, name: str) -> Case:
    def arguments(folder: Path) -> list[str]:
        # With one strategy and one period; the race is a rung's start, and the budget what all of it needs.
        tried = ["--strategies", "model_averaging", "--periods", "2", "--batch-sizes", "none"]
        short = ["--backends", "torch", "--ranks", "2", "--seeds", "1", "--race", "6", "--race-steps", "1"]
        trained = [*TINY_MODEL, "--batch-size", "4", "--epochs", "8", "--budget", "60s"]
        return ["tune", str(cases.data), str(folder / "OUT"), *tried, *short, *trained]

    return Case(name, 1, arguments, lambda folder: tune_result(folder / "OUT"), start="launching")


_MAKERS: dict[str, Callable[[Cases, str], Case]] = {
    "train": _train(2, "--backend", "torch"),
    "train-alone": _train(1, "--backend", "serial"),
    "train-averaging": _train(2, "--backend", "torch", "--strategy", "model_averaging:period=2"),
    "train-realign": _train(2, "--backend", "torch", "--realign", "1", "--realign-epochs", "1"),
    "resume": _resume("train"),
    "prepare": _prepare("--workers", "1", "--split", "random:dev=0.2,test=0.2"),
    "prepare-synthetic": _prepare("--synthetic", "0.001", "--shards", "1", "--workers", "1"),
    "shard": _shard,
    "decode": _of_a_run("decode"),
    "report": _of_a_run("report"),
    "sweep": _sweep,
    "compare": _compare(child=False),
    "compare-rank": _compare(child=True),
    "tune": _tune,
    "train-horovod": _train(2, "--backend", "horovod", start="launched"),
    "train-mpi": _train(2, "--backend", "mpi", start="launched"),
}
