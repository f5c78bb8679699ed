"""How busy a host is while a rank trains."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
import torch

from speechdp.timing import load
from speechdp.timing.timeline import Span, Timeline


def test_cores_are_means_over_the_time_since_the_meter_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, own = iter([100.0, 110.0]), iter([3.0, 11.0])
    busy = iter([(50.0, 1.0), (65.0, 3.0)])

    def cpu_times() -> object:
        user, steal = next(busy)
        return type("Times", (), {"user": user, "system": 2.0, "idle": 9.0, "steal": steal})()

    monkeypatch.setattr(load, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(time, "process_time", lambda: next(own))
    monkeypatch.setattr(psutil, "cpu_times", cpu_times)
    assert load.LoadMeter().so_far() == {"own": 0.8, "host": 1.5, "stolen": 0.2}


def test_a_rank_s_summary_holds_the_load_since_its_first_step(tmp_path: Path) -> None:
    timeline = Timeline(None, rank=0, device=torch.device("cpu"), warmup_steps=0)
    assert "load" not in timeline.summary()
    for step in range(2):
        with timeline.span(Span.FORWARD):
            sum(range(200_000))
        timeline.end_step(step, 0, 10)
    found = timeline.summary()["load"]
    assert set(found) == {"own", "host", "stolen"} and found["own"] > 0
