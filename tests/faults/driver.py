"""Let operations of a command fail one after another, and judge each time what came of it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.cases import Case
from tests.faults.fork_server import ForkServer, JobEnd, ranks
from tests.faults.points import Operation, Point, has_failed, operations, order
from tests.faults.verdict import Result, differences, faults_of_output, faults_of_refusal, summary


@dataclass(frozen=True)
class Verdict:
    """What came of a point.

    Attributes:
        point: the one.
        wrong: what was not as it should be; empty where all was.
        hung: whether processes had to be killed.
        happened: `went on`, `refused`, or `not reached` where the operation was not done this time.
    """

    point: Point
    wrong: list[str]
    hung: bool
    happened: str


@dataclass
class Driver:
    """Tries a case.

    Args:
        server: that runs jobs.
        case: what is tried.
        folder: for what the jobs leave; what went wrong is kept there.
    """

    server: ForkServer
    case: Case
    folder: Path
    _expected: Result = field(default_factory=dict)

    def learn(self) -> list[Operation]:
        """Run the case with no fault: note what it comes to, return what it does to files."""
        with self._workplace() as place:
            end = self._run(place, self.case.arguments(place.work), place.logging(self.case.size))
            assert end.exit_codes == [0] * self.case.size, summary(end)
            self._expected = self.case.result(place.work)
            return [done for rank in range(self.case.size) for done in operations(rank, place.log(rank))]

    def try_points(self, points: Iterable[Point], jobs: int) -> Iterator[Verdict]:
        """Try each; `jobs` at a time."""
        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(self.try_point, points)

    def try_point(self, point: Point) -> Verdict:
        """Let an operation fail; judge what comes of it."""
        with self._workplace() as place:
            rank = point.operation.rank
            orders = {rank: point.order(place.work, place.log(rank))}
            end = self._run(place, self.case.arguments(place.work), orders)
            wrong, happened = faults_of_output(end), "went on"
            if end.hung:
                wrong.append(f"hung: {summary(end)}")
            elif any(end.exit_codes):
                happened = "refused"
                wrong += faults_of_refusal(end, point, place.work)
                wrong += self._repeat(place)
            else:
                wrong += self._compare(place)
            if not has_failed(place.log(rank)):
                happened = "not reached"
            if wrong:
                place.keep(wrong)
            return Verdict(point, wrong, end.hung, happened)

    def try_order(self, orders: dict[int, str]) -> list[str]:
        """Run the case with orders to the shim by rank; `WORK` and `LOG` in them stand for the paths."""
        with self._workplace() as place:
            told = {r: o.replace("WORK", str(place.work)).replace("LOG", str(place.log(r))) for r, o in orders.items()}
            end = self._run(place, self.case.arguments(place.work), told)
            wrong = faults_of_output(end)
            wrong += [summary(end)] if any(end.exit_codes) else self._compare(place)
            return wrong

    def _repeat(self, place: Workplace) -> list[str]:
        """Do as a message advises, the fault being gone; return what is wrong then."""
        end = self._run(place, self.case.again(place.work), {}, "again")
        wrong = faults_of_output(end)
        if any(end.exit_codes):
            return [*wrong, f"repeated: {summary(end)}"]
        return [*wrong, *(f"repeated: {what}" for what in self._compare(place))]

    def _compare(self, place: Workplace) -> list[str]:
        try:
            return differences(self.case.result(place.work), self._expected)
        except (OSError, ValueError, KeyError) as error:
            return [f"the result cannot be read: {type(error).__name__}: {error}"]

    def _run(
        self, place: Workplace, arguments: Iterable[str], orders: dict[int, str], what: str = "first"
    ) -> JobEnd:
        return self.server.run(ranks(self.case.size, list(arguments), orders), place.folder / what)

    def _workplace(self) -> Workplace:
        place = Workplace(Path(tempfile.mkdtemp(prefix=f"{self.case.name}-", dir=self.folder)))
        self.case.set_up(place.work)
        return place


class Workplace:
    """A folder for one try: what is watched in it, and logs and output beside.  Goes, unless it is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.work = folder, folder / "work"
        self.work.mkdir()
        self._kept = False

    def log(self, rank: int) -> Path:
        """Return where a rank's operations are noted."""
        return self.folder / f"operations-{rank}"

    def logging(self, size: int) -> dict[int, str]:
        """Return orders to note all operations."""
        return {rank: order(self.work, self.log(rank)) for rank in range(size)}

    def keep(self, wrong: list[str]) -> None:
        """Leave the folder as it is."""
        self._kept = True
        (self.folder / "wrong.txt").write_text("\n".join(wrong) + "\n")

    def __enter__(self) -> Workplace:
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._kept:
            shutil.rmtree(self.folder)
