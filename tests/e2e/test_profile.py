"""`speechdp profile` from the command line: jobs of its own over 2 ranks, records, the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from speechdp.experiments.profile.record import read_profile
from tests.helpers.jobs import alone, ended_within
from tests.helpers.tiny_data import TinySizes
from tests.helpers.tiny_speech import write_tiny_speech

OPTIONS = (
    *("--task", "synthesis", "--reduction", "2", "--batch-size", "4", "--backend", "mpi"),
    *("--ranks", "2", "--only", "weak,decoder", "--steps", "5", "--warmup", "2", "--sample-hz", "50"),
)

#: Two jobs of two ranks and their parent: 10 s on idle cores, many times that on busy ones.
pytestmark = pytest.mark.timeout(600)


def test_a_profile_of_two_ranks(tmp_path: Path) -> None:
    data = write_tiny_speech(tmp_path / "data", TinySizes(train=30)).path
    out = tmp_path / "out"
    ended = ended_within(500, alone("profile", data, out, *OPTIONS))
    assert ended.exit_code == 0, ended.output
    assert "[1/2] weak-2: 2 ranks, 5 steps" in ended.stdout and " ms per step (" in ended.stdout
    assert str(out / "report" / "profile.html") in ended.stdout
    assert (out / "report" / "profile.html").stat().st_size > 10_000
    profile = read_profile(out)
    weak, decoder = profile.jobs
    assert [len(steps) for steps in weak.steps] == [5, 5] == [len(steps) for steps in decoder.steps]
    names = {function.name for function in weak.steps[1][4].functions}
    assert names == {"trainloader", "h2d", "encoder", "decoder", "postproc", "loss", "exchange", "update"}
    # Both ranks wait for one another at every exchange, so by one clock they end it in the same step.
    ends = [[f.start_s + f.duration_s for s in steps for f in s.functions if f.name == "exchange"]
            for steps in weak.steps]  # fmt: skip
    begins = [[s.start_s for s in steps] for steps in weak.steps]
    assert all(a > b for a, b in zip(ends[0], begins[1], strict=True))
    assert all(a > b for a, b in zip(ends[1], begins[0], strict=True))
    assert {f.name for f in decoder.steps[0][0].functions} == {"decoder"}
    assert weak.memory is not None and len(weak.memory.ranks) == 2
    assert weak.samples and weak.samples[0].ranks == (0, 1)
    assert weak.facts is not None and weak.facts["backend"] == "mpi"
