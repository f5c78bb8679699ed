"""The watchdog: when it ends a rank, when it must not, and what it says."""

from __future__ import annotations

import dataclasses
import itertools
import re
import threading
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path

import pytest

from speechdp.process import bounded
from speechdp.watchdog import watchdog
from speechdp.watchdog.stacks import describe_stacks, innermost_module, is_anywhere_in
from speechdp.watchdog.status import RankStatus, StatusFolder
from speechdp.watchdog.watchdog import Stillness, Watch, Watchdog
from tests.helpers.statuses import status
from tests.helpers.waiting import wait_until

#: Long enough for whatever must happen.
DEADLINE_S = 120.0
TIMEOUT_S = 2.0


class Sighted(Watchdog):
    """Judges only once it has just seen that others stand still.

    Ranks give signs of life through files, and a busy disk or core may hold one up for however long.

    Attributes:
        sees: the others that it must have seen.
        before_look: called before each look at whether the rank has stood still for too long.
    """

    sees: Collection[int] = ()
    before_look: Callable[[], object] = staticmethod(lambda: None)

    def _is_due(self, own: RankStatus, still_s: float) -> bool:
        self.before_look()
        return super()._is_due(own, still_s) and all(map(self._has_just_seen, self.sees))

    def _has_just_seen(self, rank: int) -> bool:
        seen = self._sightings.get(rank)
        return (
            seen is not None
            and seen.status is not None
            and seen.status.still_s >= self._watch.timeout_s / 2
            and seen.silent_s(self._stillness.awake_s) < self._watch.silence_s
        )


class Rank:
    """A rank whose watchdog reports its end instead of ending the process.

    Args:
        sees: ranks that must have been seen to stand still before this one ends.
        gets_on: whether every look at this rank finds that it has got on.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        run_dir: Path,
        doing: str = "comm",
        timeout_s: float = 1.0,
        *,
        sees: Collection[int] = (),
        gets_on: bool = False,
    ) -> None:
        self.status, self.gets_on = status(rank, doing), gets_on
        self._num_looks = itertools.count()
        self.said: list[str] = []
        self.exit_codes: list[int] = []
        self.has_ended = threading.Event()
        names = {other: f"rank {other}" for other in range(size) if other != rank}
        watch = Watch(
            timeout_s,
            StatusFolder(run_dir),
            self._look,
            lambda: names,
            synchronous=True,
            prefix=f"speechdp: {self.status.name}",
            before_end=lambda: self.said.append("before"),
        )
        self.watchdog = Sighted(watch, end=self._end, print_line=self.said.append)
        self.watchdog.sees = sees

    def _look(self, still_s: float, _finds_waits: bool) -> RankStatus:
        if self.gets_on:
            self.status = dataclasses.replace(self.status, beats=self.status.beats + 1)
        written = str(next(self._num_looks))  # in place of the time
        return dataclasses.replace(self.status, still_s=still_s, doing_s=still_s, written=written)

    def _end(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)
        self.has_ended.set()

    def is_watched_for(self, seconds: float) -> bool:
        """Return whether the rank was watched for so long, or has ended."""
        return self.watchdog._stillness.awake_s >= seconds or self.has_ended.is_set()


# --- standing still -----------------------------------------------------------------------------------


def test_stillness_counts_from_the_last_beat() -> None:
    stillness = Stillness(100.0, most_s=2.0)
    assert [stillness.look(100.0 + i, beats=5) for i in range(1, 4)] == [0.0, 1.0, 2.0]
    assert stillness.look(104.0, beats=6) == 0.0
    assert stillness.look(105.5, beats=6) == 1.5


def test_time_in_which_the_process_was_frozen_does_not_count() -> None:
    stillness = Stillness(0.0, most_s=2.0)
    stillness.look(1.0, beats=1)
    stillness.look(2.0, beats=1)
    assert stillness.look(3600.0, beats=1) == 3.0  # as if it had been 2 s
    assert stillness.look(3601.0, beats=1) == 4.0
    assert stillness.awake_s == 5.0


# --- ending -------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"_GRACE_S": 0.3, "FALLBACK_S": 0.6, "_POLL_S": 0.05, "_LEAST_INTERVAL_S": 0.1}
    for name, value in times.items():
        monkeypatch.setattr(watchdog, name, value)
    # What is said at the end is said in a thread that may get no core for a second.
    monkeypatch.setattr(bounded, "_PATIENCE_S", DEADLINE_S)


@pytest.mark.usefixtures("quick")
def test_a_rank_by_itself_ends_with_its_stacks_and_a_line(tmp_path: Path) -> None:
    rank = Rank(0, 1, tmp_path, "data_wait")
    with rank.watchdog:
        assert rank.has_ended.wait(DEADLINE_S)
    assert rank.exit_codes == [124]
    before, stacks, line = rank.said
    assert before == "before"
    what = r"no step ended for \d+ s \(step 12, in data_wait for \d+ s\)"
    assert re.match(rf"Stacks of rank 0 on n1, {what}:\nThread MainThread \(most recent ", stacks)
    assert "test_watchdog.py" in stacks and "in test_a_rank_by_itself" in stacks
    assert re.fullmatch(rf"speechdp: rank 0 on n1: {what}\n", line)
    assert (tmp_path / "status" / "hung.txt").read_text() == line


@pytest.mark.usefixtures("quick")
def test_every_rank_shows_its_stacks_and_names_the_late_one(tmp_path: Path) -> None:
    ranks = [
        Rank(i, 3, tmp_path, doing, TIMEOUT_S, sees={0, 1, 2} - {i})
        for i, doing in enumerate(("comm", "comm", "data_wait"))
    ]
    with ExitStack() as stack:
        for rank in ranks:
            stack.enter_context(rank.watchdog)
        for rank in ranks:
            assert rank.has_ended.wait(DEADLINE_S)
    for rank in ranks:
        assert rank.exit_codes == [124]
        assert rank.said[1].startswith(f"Stacks of rank {rank.status.rank} ")
        assert re.search(r"; late: rank 2 on n3 \(in data_wait for \d+ s\)\n$", rank.said[2])


@pytest.mark.usefixtures("quick")
def test_a_silent_rank_is_named(tmp_path: Path) -> None:
    StatusFolder(tmp_path).write(status(1))  # and never again
    rank = Rank(0, 3, tmp_path, timeout_s=TIMEOUT_S, sees={2})
    with rank.watchdog, Rank(2, 3, tmp_path, timeout_s=TIMEOUT_S).watchdog:
        assert rank.has_ended.wait(DEADLINE_S)
    assert re.search(r"late: rank 1 on n2 \(no sign of life for \d+ s\)\n$", rank.said[2])


@pytest.mark.usefixtures("quick")
def test_it_does_not_end_a_rank_that_gets_on(tmp_path: Path) -> None:
    rank = Rank(0, 1, tmp_path, "eval", TIMEOUT_S, gets_on=True)
    with rank.watchdog:
        wait_until(lambda: rank.is_watched_for(2 * TIMEOUT_S), "twice the timeout")
    assert rank.exit_codes == [] and rank.said == []


@pytest.mark.usefixtures("quick")
def test_a_rank_that_waits_lets_a_slower_one_get_on(tmp_path: Path) -> None:
    """Evaluation or a period of local steps may take one rank much longer than the timeout."""
    waiting = Rank(0, 2, tmp_path, timeout_s=TIMEOUT_S, sees={1})
    slow = Rank(1, 2, tmp_path, "eval", TIMEOUT_S, gets_on=True)
    seen_beats = [0]

    def see_it_get_on() -> None:
        """Wait for its next sign of progress, if others are looked at yet: it may be held up for long."""
        watching = waiting.watchdog
        if slow.gets_on and watching._looks(watching._stillness.still_s):
            wait_until(lambda: has_got_on() or not slow.gets_on, "progress of the slow rank")

    def has_got_on() -> bool:
        seen = waiting.watchdog._sightings.get(1)
        beats = 0 if seen is None or seen.status is None else seen.status.beats
        has_more, seen_beats[0] = beats > seen_beats[0], max(beats, seen_beats[0])
        return has_more

    waiting.watchdog.before_look = see_it_get_on
    with slow.watchdog, waiting.watchdog:
        wait_until(lambda: waiting.is_watched_for(2 * TIMEOUT_S), "twice the timeout")
        assert waiting.exit_codes == [] and slow.exit_codes == []
        slow.gets_on = False
        assert waiting.has_ended.wait(DEADLINE_S)  # once it does not get on any more
    assert re.search(r"late: rank 1 on n2 \(in eval for \d+ s\)\n$", waiting.said[2])


@pytest.mark.usefixtures("quick")
def test_a_disk_that_hangs_keeps_no_rank_from_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (watchdog, bounded):
        monkeypatch.setattr(module, "_PATIENCE_S", 0.1)
    unplugged = threading.Event()
    for name in ("write", "claim_end"):
        monkeypatch.setattr(StatusFolder, name, lambda *_: unplugged.wait(DEADLINE_S))
    rank = Rank(0, 2, tmp_path)
    with rank.watchdog:
        assert rank.has_ended.wait(DEADLINE_S)
    unplugged.set()
    assert rank.exit_codes == [124]
    late = f"; which ranks are late is unknown: {tmp_path / 'status'} cannot be read\n"
    # Said in a thread that the end waits for no longer than for the disk: a busy core may start it later.
    wait_until(lambda: any(line.endswith(late) for line in rank.said), "the line about the end")


def test_a_full_disk_does_not_disturb_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "status").write_text("a file where a folder is to be")
    monkeypatch.setattr(watchdog, "_MOST_INTERVAL_S", 0.1)
    monkeypatch.setattr(watchdog, "_POLL_S", 0.05)
    write, refused = StatusFolder.write, list[OSError]()

    def note(folder: StatusFolder, own: RankStatus) -> None:
        try:
            write(folder, own)
        except OSError as error:
            refused.append(error)
            raise

    monkeypatch.setattr(StatusFolder, "write", note)
    # No timeout of a second: the rank gives no beats, and a busy machine may not run this thread for so long.
    rank = Rank(0, 1, tmp_path, timeout_s=2 * DEADLINE_S)
    with rank.watchdog:
        wait_until(lambda: len(refused) >= 2, "another try, after the first was refused")
    assert rank.exit_codes == []


# --- stacks -------------------------------------------------------------------------------------------


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, name="the-thread", daemon=True)
    thread.start()
    return thread


def test_stacks_of_other_threads() -> None:
    event = threading.Event()
    work = threading.Event()

    def wait_in_vain() -> None:
        work.set()
        event.wait()

    thread = in_thread(wait_in_vain)
    work.wait(DEADLINE_S)
    text = describe_stacks()
    event.set()
    thread.join()
    assert "Thread the-thread (most recent call first):\n" in text
    assert "test_watchdog.py" in text and "in wait_in_vain" in text
    assert "test_stacks_of_other_threads" not in text and "_bootstrap" not in text


@pytest.mark.parametrize("timeout_s", [5.0, 30.0, 600.0])
def test_stacks_are_read_only_of_a_rank_that_stands_still(tmp_path: Path, timeout_s: float) -> None:
    """Reading them while threads run has ended good runs by SIGSEGV, on a busy machine."""
    asked: list[bool] = []

    def look(still_s: float, finds_waits: bool) -> RankStatus:
        asked.append(finds_waits)
        return dataclasses.replace(status(0, "eval"), still_s=still_s)

    watch = Watch(
        timeout_s, StatusFolder(tmp_path), look, dict, synchronous=True, prefix="", before_end=lambda: None
    )
    late_s = timeout_s / 2
    for share in (0.0, 0.001, 0.3, 0.5, 1.0):
        watch.status(share * timeout_s)
    # Where it counts: for its own end, and for whether others take it for late, by its last status too.
    assert asked[2:] == [True, True, True]
    if timeout_s >= 30:
        assert asked[:2] == [False, False]
    watch.status(late_s - watch.silence_s)
    assert asked[-1]


def test_where_a_thread_is(tmp_path: Path) -> None:
    folder = StatusFolder(tmp_path)
    rank = Rank(0, 1, tmp_path)
    assert innermost_module(threading.get_ident()) == "watchdog/stacks.py"
    wait_until(lambda: not is_anywhere_in("watchdog/watchdog.py", "_run"), "the end of those of before")
    with rank.watchdog:
        wait_until(lambda: is_anywhere_in("watchdog/watchdog.py", "_run"), "the thread that watches")
        assert not is_anywhere_in("dealing/batch_client.py", "_run")
    assert folder.path.is_dir()
