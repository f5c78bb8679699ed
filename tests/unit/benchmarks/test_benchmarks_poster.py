"""The poster benchmarks: parts of a decoder step, threads, the one-master flow, what is concluded."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.models import decoder_cost
from benchmarks.models.decoder_parts import PARTS, hands_of, make_part
from benchmarks.papers import poster, poster_model, poster_threads
from benchmarks.papers.poster_master import status_bytes, summary
from benchmarks.papers.poster_model import FUNCTIONS, LAUNCHES, Inputs, Sizes, make_function, make_inputs
from benchmarks.papers.poster_plot import draw
from benchmarks.papers.poster_schemes import EqualRanks, Job, OneMaster, Scheme, flat_gradient
from benchmarks.papers.poster_threads import Timing, in_threads, measure
from speechdp.comm.base import Communicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.experiments.profile.measured import FunctionTime, MeasuredMemory, Memory, RankRecord, StepRecord
from speechdp.experiments.profile.record import BLOCKING, WEAK, JobEntry, Profile, ProfileJob, Settings
from speechdp.models.tacotron.config import TINY
from speechdp.models.tacotron.decoder import Decoder
from tests.helpers.waiting import LIMIT_S

CPU = torch.device("cpu")
SIZES = Sizes(batch=3, symbols=4, frames=11, mel_dim=5, linear_dim=7, num_symbols=6)
CONFIG = dataclasses.replace(TINY, dropout=0.0, reduction=5)


def test_the_parts_in_a_row_are_a_step_of_the_decoder() -> None:
    torch.manual_seed(1)
    decoder = Decoder(SIZES.mel_dim, dataclasses.replace(CONFIG, decoder="loop")).eval()
    memory = torch.rand(SIZES.batch, SIZES.symbols, CONFIG.memory_dim)
    symbols = torch.ones(SIZES.batch, SIZES.symbols, dtype=torch.int64)
    frames = torch.rand(SIZES.batch, CONFIG.reduction, SIZES.mel_dim)  # those of one step
    whole = decoder(memory, symbols, frames, torch.full((SIZES.batch,), CONFIG.reduction))

    given = dataclasses.replace(
        hands_of(decoder, SIZES, CPU), frame=torch.zeros(SIZES.batch, SIZES.mel_dim), keep=None,
        memory=memory, keys=decoder.key(memory), context=torch.zeros(SIZES.batch, CONFIG.memory_dim),
    )  # fmt: skip

    def run(part: str, *state: Tensor, **handed: Any) -> Tensor:
        return PARTS[part](decoder, dataclasses.replace(given, **handed), state)[0]

    start = torch.zeros(SIZES.batch, CONFIG.attention_dim)
    residual = torch.zeros(SIZES.batch, CONFIG.decoder_dim)
    hidden = run("attention GRU", start, prenet=run("pre-net"))
    context = run("attention", hidden=hidden)
    inputs = decoder.project(torch.cat([hidden, context], dim=1))
    made = decoder.mel(run("residual GRUs", residual, residual, inputs=inputs))
    torch.testing.assert_close(made.view_as(whole.mel), whole.mel)


@pytest.mark.parametrize("part", list(PARTS))
def test_a_part_is_computed_once_a_decoder_step(part: str) -> None:
    function = make_part(part, CONFIG, SIZES, CPU)

    def both() -> None:
        function.forward()
        function.backward()

    twice = make_part(part, CONFIG, dataclasses.replace(SIZES, frames=2 * SIZES.frames + 4), CPU)

    def both_twice() -> None:
        twice.forward()
        twice.backward()

    three_steps, six_steps = decoder_cost.count_calls(both), decoder_cost.count_calls(both_twice)
    assert 1.6 < six_steps / three_steps < 2.1


def test_launches_alone_are_as_many_calls_as_the_loop_makes() -> None:
    counted = []
    for name in ("decoder loop", LAUNCHES, "decoder fast"):
        function = make_function(name, "tacotron-tiny", dataclasses.replace(SIZES, frames=50), CPU)

        def both(function: poster_model.Function = function) -> None:
            function.forward()
            function.backward()

        counted.append(decoder_cost.count_calls(both))
    loop, launches, fast = counted
    assert launches == pytest.approx(loop, rel=0.1)
    assert fast < loop / 2


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_can_be_measured_by_two_replicas_at_once(name: str) -> None:
    replicas = [make_function(name, "tacotron-tiny", SIZES, CPU) for _ in range(2)]
    timing = measure(replicas, 0.0, CPU)
    assert timing.forward_s > 0 and timing.backward_s > 0


def test_replicas_run_in_threads_of_their_own_and_their_errors_are_raised() -> None:
    names: list[str] = []
    meeting = threading.Barrier(2, timeout=LIMIT_S)

    def call() -> None:
        meeting.wait()  # only passed if both are under way at once
        names.append(threading.current_thread().name)

    in_threads([call, call])
    assert len(set(names)) == 2 and threading.current_thread().name not in names

    def wrong() -> None:
        raise ValueError("replica 1")

    with pytest.raises(ValueError, match="replica 1"):
        in_threads([lambda: None, wrong])


def _contiguous_inputs(rank: int) -> Inputs:
    whole = make_inputs(dataclasses.replace(SIZES, batch=2 * SIZES.batch), CPU)
    part = slice(rank * SIZES.batch, (rank + 1) * SIZES.batch)
    return Inputs(whole.symbols[part], whole.mel[part], whole.linear[part], whole.lengths[part])


def test_both_schemes_of_memory_train_the_same_model() -> None:
    """The master's gradient, by way of gathered outputs, is the mean of the equal ranks'."""
    one_at_a_time = threading.Lock()  # ranks are threads here and share the generator that they seed

    def train(scheme: type[Scheme]) -> list[Tensor]:
        def on_rank(comm: Communicator) -> Tensor:
            peers = comm.peers()
            job = Job(comm, peers, CONFIG, SIZES, CPU)
            with one_at_a_time:
                trained = scheme(job)
            comm.barrier()  # not while another model is drawn
            if isinstance(trained, EqualRanks):
                trained.inputs = _contiguous_inputs(comm.rank)
            trained.step()
            peers.close()
            return flat_gradient(trained.model)

        return run_threads(2, on_rank)

    master, equal = train(OneMaster)[0], train(EqualRanks)
    torch.testing.assert_close(equal[0], equal[1], rtol=0, atol=0)
    assert equal[0].abs().max() > 0
    torch.testing.assert_close(master, equal[0], rtol=1e-4, atol=1e-6)


def test_memory_figures() -> None:
    status = "Name:\tpython\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\n"
    assert status_bytes("VmHWM", status) == 2048 * 1024
    assert status_bytes("VmHWM") >= status_bytes("VmRSS") > 0
    found = summary([[300.0, 500.0], [100.0, 300.0]], {"targets": 1.23})
    assert found["working_balance"] == 3.0
    assert found["peak_balance"] == pytest.approx(1.667)


def test_efficiency_is_taken_within_a_round() -> None:
    one = [Timing(1.0, 1.0, 1.0), Timing(2.0, 2.0, 1.0), Timing(1.0, 1.0, 1.0)]
    two = [Timing(2.0, 1.0, 1.5), Timing(4.0, 2.0, 1.2), Timing(1.0, 1.0, 2.0)]
    cases = {("threads", "encoder", 1): one, ("threads", "encoder", 2): two, ("processes", "encoder", 2): one}
    found = poster_threads.conclude(cases)
    assert found["threads"]["encoder"]["2"] == {
        "efficiency": 0.667, "forward": 0.5, "backward": 1.0, "cores_busy": 1.5,
    }  # fmt: skip
    assert found["processes"]["encoder"]["2"]["efficiency"] == 1.0
    assert found["ms"]["encoder"] == [1000.0, 1000.0]


def test_a_decoder_step_is_split() -> None:
    found = {name: [2e-3, 8e-3, 4e-3] for name in ("decoder loop", "step loop", *PARTS)}
    found |= {f"{name}, launches only": [1e-3] * 3 for name in ("decoder loop", *PARTS)}
    found |= {"decoder fast": [1e-3, 2e-3, 1e-3], "step fast": [2e-3, 8e-3, 4e-3]}
    split = decoder_cost.costs(found, dict.fromkeys(("decoder loop", *PARTS), 100), 4)
    assert dataclasses.astuple(split["attention"]) == pytest.approx((1000.0, 250.0, 25.0))
    result = decoder_cost.conclude(SIZES, found, split)
    assert (result["decoder_speedup"], result["step_speedup"]) == (4.0, 1.0)  # medians of ratios: 2, 4, 4
    assert result["launch_share"] == 0.25
    assert result["loop_frames_per_s"] == round(33 / 4e-3)


def _job(kind: str, ranks: int, decoder_s: float, wait_s: float) -> ProfileJob:
    functions = (
        FunctionTime("trainloader", "", 0.0, wait_s),
        FunctionTime("decoder", "forward", wait_s, decoder_s),
    )
    steps = tuple(StepRecord(n, 0.0, wait_s + decoder_s, 9, functions) for n in (1, 2, 3))
    records = tuple(RankRecord(rank, "h", 1, 0.0, steps) for rank in range(ranks))
    memory = Memory("rss", tuple(MeasuredMemory(r, (10 + r) * 10**6, 1, 1, 1) for r in range(ranks)))
    entry = JobEntry(f"{kind}-{ranks}", kind, ranks, 4, "pooled", f"{kind}-{ranks}")
    return ProfileJob(entry, Path(), records, memory)


def test_what_the_profile_says() -> None:
    settings = Settings("synthesis", "tacotron-tiny", "fast", 4, 5, 3, 1, "CPU", "Linux", 2, ())
    jobs = (_job(WEAK, 1, 1.0, 0.0), _job(WEAK, 2, 2.0, 0.0), _job("decoder", 1, 1.0, 0.0),
            _job("decoder", 2, 1.25, 0.0), _job(BLOCKING, 2, 1.0, 1.0))  # fmt: skip
    found = poster.profile_figures(Profile(Path(), settings, jobs))
    assert found["weak"]["decoder"] == 0.5
    assert found["single"] == {"decoder": 0.8}
    assert found["wait"] == {"blocking": 0.5}
    assert (found["memory_mb"], found["memory_balance"]) == ([10.0, 11.0], 1.1)


def _found() -> dict[str, Any]:
    figures = {"efficiency": 0.5, "forward": 0.5, "backward": 0.5, "cores_busy": 1.0}
    by_function = {name: {"2": figures} for name in (*FUNCTIONS, LAUNCHES)}
    scheme = {
        "working_mb": [30.0, 10.0],
        "peak_mb": [40.0, 20.0],
        "working_balance": 3.0,
        "peak_balance": 2.0,
    }
    parts = {name: {"us": 9.0, "launches_us": 4.0, "calls": 3.0} for name in ("decoder loop", *PARTS)}
    return {
        "decoder": {"decoder_speedup": 3.5, "step_speedup": 1.5, "launch_share": 0.4, "parts": parts},
        "threads": {"threads": by_function, "processes": by_function},
        "memory": {"master": scheme, "equal": scheme},
    }


def test_the_last_line_has_what_was_measured() -> None:
    result = poster.conclude(_found())
    assert (result["decoder_speedup"], result["poster_memory_balance"]) == (3.5, 2.0)
    assert result["threads_launch_efficiency"] == 0.5
    assert "weak_efficiency" not in result


def test_the_command_line() -> None:
    given = poster.parse(["DATA", "--quick", "--only", "decoder,memory", "--", "--reduction", "2"])
    assert (given.data, given.only, given.options) == (
        Path("DATA"),
        ["decoder", "memory"],
        ["--reduction", "2"],
    )
    assert poster.programs_of(given)["decoder"] == (
        "decoder_cost",
        ["--preset", "tacotron-tiny", "--rounds", "1"],
    )
    on_gpu = poster.parse(["--gpu"])
    assert (on_gpu.preset, on_gpu.ranks, on_gpu.options) == ("tacotron", [1], ["--device", "cuda"])
    with pytest.raises(SystemExit):
        poster.parse(["--only", "encoder"])


def test_finished_parts_are_read_back(tmp_path: Path) -> None:
    (tmp_path / "memory.json").write_text('{"kept": 1}')
    given = poster.parse(["--only", "memory"])
    assert poster.run_parts(given, tmp_path) == {"memory": {"kept": 1}}


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw(tmp_path / "new" / "p.png", _found())
    assert (tmp_path / "new" / "p.png").stat().st_size > 10_000
