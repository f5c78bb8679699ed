"""RUN/status/: one writer a file, and readers that bear whatever stands there."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from speechdp.watchdog.status import StatusFolder
from tests.helpers.network_disk import remember_as_missing
from tests.helpers.statuses import status


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = StatusFolder(tmp_path)
    assert folder.read(1) is None
    first, second = status(1, "data_wait", step=123_456), status(1, "comm", step=7)
    folder.write(first)
    assert folder.read(1) == first
    folder.write(second)  # shorter: nothing of the first is left
    assert folder.read(1) == second
    assert json.loads((tmp_path / "status" / "rank-0001.json").read_text())["doing"] == "comm"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1, 2]",
        b"null",
        b"\xff\xfe",
        json.dumps({**dataclasses.asdict(status(1)), "step": "many"}).encode(),
        json.dumps({**dataclasses.asdict(status(1)), "step": 1e999}).encode(),
        json.dumps({**dataclasses.asdict(status(1)), "name": "rank 1\x1b[2J"}).encode(),
        json.dumps(dataclasses.asdict(status(2))).encode(),
        b"[" * 100_000,
    ],
)
def test_nonsense_is_no_status(tmp_path: Path, content: bytes) -> None:
    folder = StatusFolder(tmp_path)
    folder.write(status(1))
    (tmp_path / "status" / "rank-0001.json").write_bytes(content)
    assert folder.read(1) is None


def test_only_the_first_rank_claims_the_end(tmp_path: Path) -> None:
    mine, another = StatusFolder(tmp_path), StatusFolder(tmp_path)
    mine.write(status(0))
    assert not another.is_ending()
    assert mine.claim_end("speechdp: rank 0 on n1: no step ended\n")
    assert another.is_ending() and not another.claim_end("another\n")
    assert (tmp_path / "status" / "hung.txt").read_text() == "speechdp: rank 0 on n1: no step ended\n"


def test_an_end_that_a_rank_on_another_host_has_claimed_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = StatusFolder(tmp_path)
    folder.write(status(0))
    assert folder.claim_end("")
    remember_as_missing(monkeypatch, [tmp_path / "status" / "hung.txt"])
    assert folder.is_ending()


def test_a_new_start_clears_what_the_last_has_left(tmp_path: Path) -> None:
    folder = StatusFolder(tmp_path)
    folder.clear()
    folder.write(status(0))
    assert folder.claim_end("")
    folder.clear()
    assert os.listdir(tmp_path / "status") == []  # noqa: PTH208
    assert not folder.is_ending() and folder.read(0) is None
