"""The watchdog: when it ends a rank, when it must not, and what it says."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections.abc import Callable
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
#: Seconds; ranks give signs of life through files, and a busy disk or core may hold one up for a second.
LENIENT_S = 8.0


class Rank:
    """A rank whose watchdog reports its end instead of ending the process."""

    def __init__(
        self, rank: int, size: int, run_dir: Path, doing: str = "comm", timeout_s: float = 1.0
    ) -> None:
        self.status = status(rank, doing)
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
        self.watchdog = Watchdog(watch, end=self._end, print_line=self.said.append)

    def _look(self, still_s: float, _finds_waits: bool) -> RankStatus:
        return dataclasses.replace(self.status, still_s=still_s, doing_s=still_s)

    def _end(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)
        self.has_ended.set()

    def beat(self) -> None:
        self.status = dataclasses.replace(self.status, beats=self.status.beats + 1)


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
    ranks = [Rank(i, 3, tmp_path, doing, LENIENT_S) for i, doing in enumerate(("comm", "comm", "data_wait"))]
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
    rank = Rank(0, 3, tmp_path, timeout_s=LENIENT_S)
    with rank.watchdog, Rank(2, 3, tmp_path, timeout_s=LENIENT_S).watchdog:
        assert rank.has_ended.wait(DEADLINE_S)
    assert re.search(r"late: rank 1 on n2 \(no sign of life for \d+ s\)\n$", rank.said[2])


@pytest.mark.usefixtures("quick")
def test_it_does_not_end_a_rank_that_gets_on(tmp_path: Path) -> None:
    rank = Rank(0, 1, tmp_path, "eval", 3.0)
    with rank.watchdog:
        for _ in range(60):  # for twice the timeout
            rank.beat()
            time.sleep(0.1)
    assert rank.exit_codes == [] and rank.said == []


@pytest.mark.usefixtures("quick")
def test_a_rank_that_waits_lets_a_slower_one_get_on(tmp_path: Path) -> None:
    """Evaluation or a period of local steps may take one rank much longer than the timeout."""
    waiting, slow = Rank(0, 2, tmp_path, timeout_s=4.0), Rank(1, 2, tmp_path, "eval", 4.0)
    with waiting.watchdog, slow.watchdog:
        for _ in range(80):  # for twice the timeout
            slow.beat()
            time.sleep(0.1)
        assert waiting.exit_codes == [] and slow.exit_codes == []
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
