"""Utterances/s of a user's own script with speechdp beside the same script over torch's own averaging.

    python benchmarks/strategies/own_loop.py [--rounds 7] [--seconds 8] [--ranks 2] [--period 16]
        [--width 256]

The script is examples/asr_ctc: a Transformer with CTC, AdamW and a scheduler, written by the user.  With
`DataParallel` on the torch back-end it stands beside DistributedDataParallel (gradient averaging) and beside
DDP's PostLocalSGDOptimizer (model averaging of the same period); all four over gloo.
Each contender in processes of its own, in turn; ratios within a round, medians over rounds.
Last line: JSON {"gradient_averaging_vs_ddp", "model_averaging_vs_postlocal", "changed_lines"}; 1 means equal
speed; changed lines are those of train.py that plain.py has not.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "asr_ctc"
sys.path.insert(0, str(EXAMPLE))

from digits import Recogniser, batches, loss_sum  # type: ignore[import-not-found]  # noqa: E402

import speechdp  # noqa: E402
from benchmarks.strategies.contenders import Meeting, print_rate, timed  # noqa: E402
from benchmarks.strategies.paired import compare, launch_ranks, run_rounds  # noqa: E402
from benchmarks.strategies.peer_loops import Ranks, post_local_sgd_of, process_group  # noqa: E402
from speechdp.comm import environment  # noqa: E402
from speechdp.comm.base import Communicator  # noqa: E402

OURS = {
    "gradient_averaging": "gradient_averaging",
    "model_averaging": "model_averaging:period={period}",
}
DDP, POST_LOCAL = "torch DDP", "torch PostLocalSGD"
#: Batches each rank has; it passes through them again and again.
_NUM_BATCHES = 60

Batch = tuple[Tensor, Tensor]


def script(width: int) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return what train.py makes before its loop."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Recogniser(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.5)


def with_speechdp(comm: Communicator, strategy: str, arguments: argparse.Namespace) -> None:
    """Time the loop of train.py; rank 0 prints the rate of the job."""
    model, optimizer, scheduler = script(arguments.width)
    data = batches(_NUM_BATCHES, seed=1 + comm.rank) * 10_000
    with speechdp.DataParallel(model, optimizer, comm, strategy) as run:
        source: Iterator[Batch] = run.batches(data)

        def advance() -> int:
            features, texts = next(source)
            with run.step(weight=len(texts)) as step:
                step.backward(loss_sum(model, features, texts))
            scheduler.step()
            return len(texts)

        figures = timed(comm, advance, arguments.seconds, whole=arguments.period)
    print_rate(comm, *figures)


#: Gives the model and the optimizer as torch's averaging wraps them.
Wrapping = Callable[..., AbstractContextManager[tuple[nn.Module, Any]]]


@contextlib.contextmanager
def ddp(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks, period: int) -> Iterator[Any]:
    """Give DistributedDataParallel."""
    del period
    with process_group(ranks):
        yield nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer


@contextlib.contextmanager
def post_local(
    model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks, period: int
) -> Iterator[Any]:
    """Give DDP whose gradients stay local, and an averager of parameters."""
    with process_group(ranks) as dist:
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        yield wrapped, post_local_sgd_of(wrapped, optimizer, dist, period)


def with_torch(wrapping: Wrapping, arguments: argparse.Namespace) -> None:
    """Time the loop of plain.py over torch's averaging; rank 0 prints the rate of the job."""
    ranks = Ranks()
    try:
        model, optimizer, scheduler = script(arguments.width)
        with wrapping(model, optimizer, ranks, arguments.period) as (wrapped, averaging):
            source = iter(batches(_NUM_BATCHES, seed=1 + ranks.rank) * 10_000)

            def advance() -> int:
                features, texts = next(source)
                averaging.zero_grad()
                loss = loss_sum(wrapped, features, texts)
                (loss / len(texts)).backward()
                averaging.step()
                scheduler.step()
                return len(texts)

            meeting: Meeting = ranks
            print_rate(meeting, *timed(meeting, advance, arguments.seconds, whole=arguments.period))
        ranks.finalise()
    except BaseException:  # every way out of a rank must end the others
        traceback.print_exc()
        ranks.world.Abort(1)
    environment.end_process(0)  # torch.distributed aborts now and then in an ordinary exit


def run_rank(arguments: argparse.Namespace) -> None:
    """Be a rank of a contender."""
    if arguments.rank_of in OURS:
        strategy = OURS[arguments.rank_of].format(period=arguments.period)
        speechdp.run_ranks(lambda comm: with_speechdp(comm, strategy, arguments), backend="torch")
    else:
        with_torch(ddp if arguments.rank_of == DDP else post_local, arguments)


def changed_lines() -> list[str]:
    """Return the lines of train.py that plain.py has not, its docstring and indentation apart."""
    plain, ours = (
        [line.strip() for line in (EXAMPLE / name).read_text().splitlines()[1:]]
        for name in ("plain.py", "train.py")
    )
    return [line for line in difflib.ndiff(plain, ours) if re.match(r"\+ .", line)]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--period", type=int, default=16, help="steps between averages of parameters")
    parser.add_argument("--width", type=int, default=256, help="of the Transformer; the example has 48")
    parser.add_argument("--rank-of", default="", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main() -> None:
    arguments = parse()
    if arguments.rank_of:
        return run_rank(arguments)

    def measure(contender: str) -> float:
        program = [__file__, "--rank-of", contender]
        for option in ("seconds", "period", "width"):
            program += [f"--{option}", str(getattr(arguments, option))]
        return launch_ranks(arguments.ranks, program)["rate"]

    names = [*OURS, DDP, POST_LOCAL]
    rates = run_rounds(names, measure, arguments.rounds, f"utterances/s on {arguments.ranks} ranks")
    result = {
        "gradient_averaging_vs_ddp": compare(rates, "gradient_averaging", DDP),
        "model_averaging_vs_postlocal": compare(rates, "model_averaging", POST_LOCAL),
        "changed_lines": len(changed_lines()),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
