"""Let operations of a command fail one after another, and judge each time what came of it."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.faults.cases import Case
from tests.faults.fork_server import ForkServer, JobEnd, Process, ranks
from tests.faults.points import Operation, Point, has_failed, operations, order, reason_of
from tests.faults.results import Result, differences
from tests.faults.verdict import faults_of_output, faults_of_refusal, summary
from tests.helpers.jobs import by_launch
from tests.helpers.mpi import run_job

#: Seconds after which a job hangs: it takes half a second, launched or launching others 5 to 20 s; ranks look
#: for rank 0's files for 65 s; and other tests run beside it.
_LIMIT_S = 240.0


@dataclass(frozen=True)
class Verdict:
    """What came of a point.

    Attributes:
        point: the one.
        wrong: what was not as it should be; empty where all was.
        hung: whether processes had to be killed.
        happened: `went on`, `refused`, or `not reached` where the operation was not done this time.
        seconds: from the start of the command to the end of the last of its processes.
    """

    point: Point
    wrong: list[str]
    hung: bool
    happened: str
    seconds: float


class Driver:
    """Tries a case.

    Args:
        server: that runs jobs.
        case: what is tried.
        folder: for what the jobs leave; what went wrong is kept there.
        keep_all: keep what went well, too.
        spoilt: how the command is spoilt (spoilt.py), to see that it is found; empty: not at all.
    """

    def __init__(
        self, server: ForkServer, case: Case, folder: Path, *, keep_all: bool = False, spoilt: str = ""
    ) -> None:
        self._server, self._case, self._folder, self._keep_all = server, case, folder, keep_all
        self._spoilt = spoilt
        self._expected: Result = {}

    def learn(self) -> list[Operation]:
        """Run the case with no fault, twice: note what it comes to, return what it does to files."""
        results, done = [], []
        for rank in range(max(2, self._case.size)):
            watched = min(rank, self._case.size - 1)
            with self._workplace() as place:
                end = self._run(place, {watched: order(place.work, place.log(watched))})
                assert end.is_well, summary(end)
                results.append(self._case.result(place.work))
                if rank < self._case.size:
                    done += operations(watched, place.log(watched))
        first = results[0]
        same = {name for name in first if all(other.get(name) == first[name] for other in results)}
        self._expected = {name: first[name] if name in same else _VARIES for name in first}
        return done

    def try_points(self, points: Iterable[Point], jobs: int) -> Iterator[Verdict]:
        """Try each; `jobs` at a time."""
        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(self.try_point, points)

    def try_point(self, point: Point) -> Verdict:
        """Let an operation fail; judge what comes of it."""
        with self._workplace() as place:
            rank = point.operation.rank
            end = self._run(place, {rank: point.order(place.work, place.log(rank))})
            wrong, happened = faults_of_output(end), "went on"
            if end.hung:
                wrong.append(f"hung: {summary(end)}")
            elif not end.is_well:
                happened = "refused"
                wrong += faults_of_refusal(end, point, place.work, through=self._is_told_through)
                wrong += self._repeat(place, end)
            elif not self._is_named(point, place):
                wrong += self._compare(place, end)
            if not has_failed(place.log(rank)):
                happened = "not reached"
            if wrong or self._keep_all:
                place.keep(wrong)
            return Verdict(point, wrong, end.hung, happened, end.seconds)

    def try_order(self, rank: int, **settings: object) -> list[str]:
        """Run the case with an order to a rank's shim; return what is wrong unless it ends as ever."""
        with self._workplace() as place:
            end = self._run(place, {rank: order(place.work, place.log(rank), **settings)})
            wrong = faults_of_output(end)
            return [*wrong, *(self._compare(place, end) if end.is_well else [summary(end)])]

    def _is_named(self, point: Point, place: Workplace) -> bool:
        """Return whether the command's page names what could not be read."""
        page = place.work / self._case.page
        if not self._case.page or not page.is_file():
            return False
        text, name = page.read_text(), Path(point.operation.path).name
        return reason_of(point.error) in text or (point.error == "ENOENT" and f"{name}: missing" in text)

    @property
    def _is_told_through(self) -> bool:
        return self._case.child or self._case.start == "launched"

    def _repeat(self, place: Workplace, failed: JobEnd) -> list[str]:
        """Do as a message advises, the fault being gone; return what is wrong then."""
        end = self._run(place, {}, "again", self._case.again)
        wrong = faults_of_output(end)
        resumes = "--resume" in (*self._case.arguments(place.work), *self._case.again)
        if not end.is_well and not resumes and "--overwrite" in "".join(end.stderr):
            end = self._run(place, {}, "overwritten", ("--overwrite",))
            wrong += faults_of_output(end)
        if not end.is_well:
            return [*wrong, f"repeated: {summary(end)}"]
        return [*wrong, *(f"repeated: {what}" for what in self._compare(place, failed, end))]

    def _compare(self, place: Workplace, *ends: JobEnd) -> list[str]:
        try:
            result = self._case.result(place.work)
        except (OSError, ValueError, LookupError) as error:
            return [f"the result cannot be read: {type(error).__name__}: {error}"]
        varying = {name for name, value in self._expected.items() if value is _VARIES}
        return differences(
            {name: _VARIES if name in varying else value for name, value in result.items()},
            self._expected,
            "".join(text for end in ends for text in end.stdout),
        )

    def _run(
        self, place: Workplace, orders: Mapping[int, str], what: str = "first", more: Iterable[str] = ()
    ) -> JobEnd:
        case = self._case
        arguments = [*case.arguments(place.work), *more]
        if case.start == "launched":
            return self._launch(arguments, orders)
        processes = ranks(case.size, arguments, orders, self._spoilt)
        if case.child:
            processes = [Process(arguments, env=self._environment(orders))]
        return self._server.run(processes, place.folder / what, limit_s=_LIMIT_S)

    def _launch(self, arguments: Iterable[str], orders: Mapping[int, str]) -> JobEnd:
        begun = time.monotonic()
        try:
            ended = run_job(
                by_launch(self._case.size, *arguments),
                env={**self._server.environment, **self._environment(orders)},
                timeout_s=_LIMIT_S,
            )
        except AssertionError as hung:
            return JobEnd([-9], [""], [str(hung)], _LIMIT_S, hung=True)
        seconds = time.monotonic() - begun
        return JobEnd([ended.exit_code], [ended.stdout], [ended.stderr], seconds, hung=False)

    def _environment(self, orders: Mapping[int, str]) -> dict[str, str]:
        for rank, text in orders.items():
            return {"IOFAULT": f"{text};rank={rank}"}
        return {}

    def _workplace(self) -> Workplace:
        place = Workplace(Path(tempfile.mkdtemp(prefix=f"{self._case.name}-", dir=self._folder)))
        self._case.set_up(place.work)
        return place


#: Stands for what is different each time.
_VARIES = "(varies)"


class Workplace:
    """A folder for one try: what is watched in it, and logs and output beside.  Goes, unless it is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.work = folder, folder / "work"
        self.work.mkdir()
        self._kept = False

    def log(self, rank: int) -> Path:
        """Return where a rank's operations are noted."""
        return self.folder / f"operations-{rank}"

    def keep(self, wrong: list[str]) -> None:
        """Leave the folder as it is."""
        self._kept = True
        (self.folder / "wrong.txt").write_text("\n".join(wrong) + "\n")

    def __enter__(self) -> Workplace:
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._kept:
            shutil.rmtree(self.folder)
