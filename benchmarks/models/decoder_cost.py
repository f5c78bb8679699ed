"""Where the time of a decoder step goes, and what the fast decoder makes of it.

    python benchmarks/models/decoder_cost.py [--preset tacotron-tiny] [--device cpu] [--precision fp32]
        [--rounds 7]

Three things, all forward and backward, on random batches of the preset's size:

1. The decoder alone, and a whole training step (model, loss, backward, Adam), with the decoder as the plain
   loop over steps and as the fast one, in turn: the speed-ups are medians over rounds of loop / fast.
2. The parts of the plain loop, each alone, as often as there are decoder steps: the pre-net, the attention
   GRU, the attention, the two residual GRUs, the projections.
3. The same parts and the same decoder on tensors of an element or two: what is left is calls, Python's,
   PyTorch's dispatcher's and autograd's; on a GPU, launches.  A part's time less this is its arithmetic.

Last line: JSON {"decoder_speedup": ..., "step_speedup": ..., "loop_frames_per_s": ..., "fast_frames_per_s":
..., "launch_share": of the loop, "step_us": of the loop, "parts": {part: {"us", "launches_us", "calls"}},
"loop_calls": a decoder step, "fast_calls", "speedup_by_batch": of the decoder}.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from rich import box
from rich.table import Table
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.models.decoder_parts import PARTS, make_part
from benchmarks.papers import poster_model
from benchmarks.papers.poster_model import CONFIGS, LAUNCHES, Function, Sizes, timed
from speechdp.cli.support.console import make_console
from speechdp.models.tacotron.config import DecoderKind, TacotronConfig

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}


class CountedCalls(TorchDispatchMode):
    """Counts the operations that reach PyTorch's dispatcher, backward's included."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Cost:
    """A part of the plain loop.

    Attributes:
        us: microseconds a decoder step, forward and backward.
        launches_us: the same on tensors of an element or two.
        calls: operations a step, forward and backward.
    """

    us: float
    launches_us: float
    calls: float


class Step:
    """A whole training step: model, losses as means over frames, backward, Adam."""

    def __init__(self, config: TacotronConfig, sizes: Sizes, device: torch.device) -> None:
        self._model = poster_model.make_model(config, sizes, device)
        self._inputs = poster_model.make_inputs(sizes, device)
        self._optimizer = torch.optim.Adam(self._model.parameters())

    def __call__(self) -> None:
        inputs = self._inputs
        self._optimizer.zero_grad()
        output = self._model(inputs.symbols, inputs.mel, inputs.lengths)
        loss = nn.functional.l1_loss(output.mel, inputs.mel) + nn.functional.l1_loss(
            output.linear, inputs.linear
        )
        stop = nn.functional.binary_cross_entropy_with_logits(
            output.stop_logits, torch.zeros_like(output.stop_logits)
        )
        (loss + stop).backward()
        self._optimizer.step()


def make_functions(given: argparse.Namespace) -> dict[str, Function]:
    """Return the decoder both ways and the parts of its loop, at the preset's size and at the smallest."""
    device, sizes = torch.device(given.device), sizes_of(given)
    config = poster_model.config_of(given.preset, "loop")
    found = {
        name: poster_model.make_function(name, given.preset, sizes, device)
        for name in ("decoder loop", "decoder fast", LAUNCHES)
    }
    small = dataclasses.replace(poster_model.ONE, frames=sizes.frames)
    for part in PARTS:
        found[part] = make_part(part, config, sizes, device)
        found[f"{part}, launches only"] = make_part(part, poster_model.smallest(config), small, device)
    return found


def in_precision(call: Callable[[], None], given: argparse.Namespace) -> Callable[[], None]:
    """Return the call under autocast, where another precision than fp32 is asked for."""
    dtype = PRECISIONS[given.precision]

    def run() -> None:
        with torch.autocast(torch.device(given.device).type, dtype=dtype, enabled=dtype is not None):
            call()

    return run


def both_ways(function: Function, given: argparse.Namespace) -> Callable[[], None]:
    """Return a call for a function's forward pass and its backward pass, which autocast must not enclose."""
    forward = in_precision(function.forward, given)

    def run() -> None:
        forward()
        function.backward()

    return run


def make_calls(given: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """Return everything that is timed at the preset's size, by name."""
    calls = {name: both_ways(function, given) for name, function in make_functions(given).items()}
    kinds: tuple[DecoderKind, ...] = ("loop", "fast")
    for kind in kinds:
        config = poster_model.config_of(given.preset, kind)
        calls[f"step {kind}"] = in_precision(Step(config, sizes_of(given), torch.device(given.device)), given)
    return calls


def speedups(given: argparse.Namespace) -> dict[str, float]:
    """Return how many times as fast the fast decoder is, by batch size; print each."""
    device, found = torch.device(given.device), {}
    for batch in given.batches:
        sizes = dataclasses.replace(sizes_of(given), batch=batch)
        calls = {}
        for name in ("decoder loop", "decoder fast"):
            function = poster_model.make_function(name, given.preset, sizes, device)
            calls[name] = both_ways(function, given)
        times = run_rounds(calls, given.rounds, device)
        found[str(batch)] = round(ratio(times, "decoder loop", "decoder fast"), 3)
        print(f"decoder with batch {batch}: {found[str(batch)]:.2f} times as fast", flush=True)
    return found


def sizes_of(given: argparse.Namespace) -> Sizes:
    """Return the batch: the preset's, where nothing else is asked for."""
    named = {"batch": given.batch, "symbols": given.symbols, "frames": given.frames}
    chosen = {name: value for name, value in named.items() if value}
    return dataclasses.replace(poster_model.sizes_of(given.preset), **chosen)


def run_rounds(
    calls: dict[str, Callable[[], None]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Return each call's seconds in each round, forwards and backwards in turn, after two calls of each."""
    for call in calls.values():
        timed(call, device)
        timed(call, device)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in list(calls)[:: 1 if number % 2 == 0 else -1]:
            found[name].append(timed(calls[name], device))
    return found


def ratio(found: dict[str, list[float]], slow: str, fast: str) -> float:
    """Return the median over rounds of slow / fast."""
    return statistics.median(a / b for a, b in zip(found[slow], found[fast], strict=True))


def costs(found: dict[str, list[float]], calls: dict[str, int], num_steps: int) -> dict[str, Cost]:
    """Return what the loop and its parts cost a decoder step."""
    us = {name: 1e6 * statistics.median(times) / num_steps for name, times in found.items()}
    return {
        name: Cost(us[name], us[f"{name}, launches only"], calls[name] / num_steps)
        for name in ("decoder loop", *PARTS)
    }


def count_calls(call: Callable[[], None]) -> int:
    """Return how many operations a call makes when it is made again."""
    call()  # a first call makes more: gradients that are drawn, memory that is set aside
    with CountedCalls() as counted:
        call()
    return counted.calls


def conclude(sizes: Sizes, found: dict[str, list[float]], split: dict[str, Cost]) -> dict[str, Any]:
    """Return the last line."""
    loop = split["decoder loop"]
    frames = sizes.batch * sizes.frames
    return {
        "decoder_speedup": round(ratio(found, "decoder loop", "decoder fast"), 3),
        "step_speedup": round(ratio(found, "step loop", "step fast"), 3),
        "loop_frames_per_s": round(frames / statistics.median(found["decoder loop"])),
        "fast_frames_per_s": round(frames / statistics.median(found["decoder fast"])),
        "launch_share": round(loop.launches_us / loop.us, 3),
        "step_us": round(loop.us, 1),
        "parts": {
            name: {key: round(value, 1) for key, value in dataclasses.asdict(cost).items()}
            for name, cost in split.items()
        },
    }


def show(split: dict[str, Cost]) -> None:
    """Print the table of the loop and its parts."""
    table = Table(title="A decoder step of the plain loop", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("part")
    for title in ("µs", "calls alone, µs", "calls' share", "calls"):
        table.add_column(title, justify="right")
    for name, cost in split.items():
        share = f"{100 * cost.launches_us / cost.us:.0f} %"
        table.add_row(name, f"{cost.us:.0f}", f"{cost.launches_us:.0f}", share, f"{cost.calls:.0f}")
    make_console().print(table)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=list(CONFIGS), default="tacotron-tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=list(PRECISIONS), default="fp32")
    parser.add_argument("--rounds", type=int, default=7)
    numbers = "batch sizes that the two decoders are compared at beside the preset's"
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",") if n], help=numbers)
    for name in ("batch", "symbols", "frames"):
        parser.add_argument(f"--{name}", type=int, default=0, help="instead of the preset's")
    given = parser.parse_args(arguments)
    given.batches = [16, 32] if given.batches is None else given.batches
    return given


def main() -> None:
    given = parse(sys.argv[1:])
    torch.set_num_threads(1)
    calls = make_calls(given)
    counted = {name: count_calls(calls[name]) for name in ("decoder loop", "decoder fast", *PARTS)}
    found = run_rounds(calls, given.rounds, torch.device(given.device))
    sizes = sizes_of(given)
    num_steps = poster_model.config_of(given.preset).num_steps(sizes.frames)
    split = costs(found, counted, num_steps)
    show(split)
    result = conclude(sizes, found, split)
    for name in ("decoder", "step"):
        loop, fast = (1e3 * statistics.median(found[f"{name} {kind}"]) for kind in ("loop", "fast"))
        faster = result[f"{name}_speedup"]
        print(f"{name:<8} loop {loop:.1f} ms, fast {fast:.1f} ms: {faster:.2f} times as fast")
    for kind in ("loop", "fast"):
        result[f"{kind}_calls"] = round(counted[f"decoder {kind}"] / num_steps, 1)
    print(f"calls a decoder step: loop {result['loop_calls']:.0f}, fast {result['fast_calls']:.0f}")
    result["speedup_by_batch"] = speedups(given)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
