"""Parts of runs trained in one start, on one rank: what they leave, and what they leave behind."""

from __future__ import annotations

import json
import signal
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from speechdp.comm.serial import SerialCommunicator
from speechdp.experiments.tune.parts import TOOK, Part, Parts, forget_took, read_took, train_parts
from speechdp.parallel.stop import StopRequest
from speechdp.process.ending import Paused, Stopped
from speechdp.train import build
from speechdp.train.progress import Reporter, SilentReporter
from speechdp.train.realign import train_with_realignment
from speechdp.train.session import Session
from tests.helpers.options import options_with
from tests.helpers.tiny_data import TinySizes, write_tiny_data

GRADIENTS, RARE = "gradient_averaging", "model_averaging:period=4"
OPTIONS = options_with(batch_size=2, layers=2, cells=8, dropout=0.3, epochs=4, learning_rate=0.02)
PARTS = (
    Part("a", GRADIENTS, seed=1, pause_at=4),
    Part("b", RARE, 4, seed=1, pause_at=3),
    Part("m", GRADIENTS, seed=1, max_steps=5, anew=True),
    Part("a", GRADIENTS, seed=1, pause_at=9),
)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(
        write_tiny_data(tmp_path / "data", TinySizes(train=40)), SerialCommunicator(), torch.device("cpu")
    )


def silent(name: str) -> Reporter:
    return SilentReporter()


def steps_of(run_dir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_runs_are_bitwise_those_that_are_trained_by_themselves(session: Session, tmp_path: Path) -> None:
    train_parts(session, OPTIONS, Parts(PARTS), tmp_path / "together", silent)
    for part in PARTS:
        run_dir = tmp_path / "apart" / part.folder
        begun = (run_dir / "run.json").exists()
        with suppress(Paused):
            options = part.options(OPTIONS)
            train_with_realignment(session, options, run_dir, resume=begun, pause_at=part.pause_at)
    for name in ("a", "b", "m"):
        together, apart = tmp_path / "together" / name, tmp_path / "apart" / name
        if name != "m":  # which ends before it is evaluated
            assert steps_of(together) == steps_of(apart) and steps_of(together)
        files = sorted(path.relative_to(apart) for path in apart.rglob("*.safetensors"))
        assert files
        for file in files:
            found, wanted = load_file(together / file), load_file(apart / file)
            assert found.keys() == wanted.keys(), file
            assert all(torch.equal(found[key], wanted[key]) for key in wanted), file
    command = json.loads((tmp_path / "together" / "b" / "run.json").read_text())["command"]
    assert command[:2] == ["speechdp", "train"] and f"--strategy={RARE}" in command
    assert "--batch-size=4" in command


def test_a_run_that_is_over_holds_no_memory(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas: list[weakref.ref[object]] = []
    make = build.make_replica

    def noted(*given: object) -> object:
        replica = make(*given)  # type: ignore[arg-type]
        replicas.append(weakref.ref(replica))
        return replica

    monkeypatch.setattr(build, "make_replica", noted)
    train_parts(session, OPTIONS, Parts(PARTS), tmp_path / "runs", silent)
    assert len(replicas) == len(PARTS)
    assert [number for number, replica in enumerate(replicas) if replica() is not None] == []


def test_a_run_begins_anew_where_it_is_told_to(session: Session, tmp_path: Path) -> None:
    measured = Part("m", GRADIENTS, max_steps=3, anew=True)
    for _ in range(2):
        (tmp_path / "runs").mkdir(exist_ok=True)
        train_parts(session, OPTIONS, Parts((measured,)), tmp_path / "runs", silent)
        left = tmp_path / "runs" / "m" / "report"
        assert not left.exists()
        left.mkdir()


def test_no_part_begins_after_its_time_or_a_signal(session: Session, tmp_path: Path) -> None:
    train_parts(session, OPTIONS, Parts(PARTS, longest_s=1e-6), tmp_path, silent)
    assert len(read_took(tmp_path)) <= 1 and not (tmp_path / "b").exists()
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        asked = Session(session.dataset, session.comm, session.device, stop=stop)
        with pytest.raises(Stopped):
            train_parts(asked, OPTIONS, Parts(PARTS), tmp_path / "asked", silent)
    assert not (tmp_path / "asked").exists()


def test_what_parts_have_taken_is_forgotten_or_damaged_as_if_they_had_not_begun(tmp_path: Path) -> None:
    assert read_took(tmp_path / "none", is_over=True) == []
    for text in ("", "{", "[]", '{"took_s": 3}', '{"format": "speechdp-parts"}'):
        (tmp_path / TOOK).write_text(text)
        assert read_took(tmp_path) == []
    (tmp_path / TOOK).write_text('{"took_s": [1.5, 2]}')
    assert read_took(tmp_path, is_over=True) == [1.5, 2.0]
    forget_took(tmp_path)
    forget_took(tmp_path)
    assert read_took(tmp_path) == []
