"""Train, evaluate and save on a fake GPU.

    python -m tests.helpers.fake_gpu.train LIBRARY TASK PRECISION STRATEGY... [-- TASK PRECISION ...]

Ends with an error where a tensor of the host meets one of the device.  Prints what streams and events were
told while the first step of each strategy exchanged, and between `--` a line `exit code N`.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.helpers.fake_gpu import cuda

if __name__ == "__main__":
    cuda.load(Path(sys.argv[1]))

import torch
from torch import Tensor, nn

from speechdp.checkpoint.state import split_state
from speechdp.comm.base import Communicator, PeerCommunicator, ReduceOp, Work
from speechdp.comm.staging import Staged, as_bytes
from speechdp.data.loading.batch import Batch
from speechdp.data.loading.device_stream import DeviceStream
from speechdp.data.loading.stage_times import StageTimes
from speechdp.models.captured import Graphs
from speechdp.models.lstm_am import LstmAcousticModel, LstmConfig
from speechdp.models.precision import Precision
from speechdp.models.tacotron.config import TINY
from speechdp.models.tacotron.model import Tacotron
from speechdp.parallel.loss_scale import make_scaler
from speechdp.parallel.registry import parse_strategy
from speechdp.parallel.replica import Replica
from speechdp.parallel.strategy import Progress
from speechdp.parallel.training_step import TrainingStep
from speechdp.tasks.acoustic import AcousticTask
from speechdp.tasks.base import Task
from speechdp.tasks.synthesis import SynthesisTask
from speechdp.timing.timeline import Timeline
from tests.helpers.repeats import Repeats

DEVICE = torch.device("cuda", 0)
MELS, LINEAR, SYMBOLS = 6, 9, 5
#: Each is a step of the recurrences, one like the other.
FRAMES = 3


def _exchanged(x: Tensor, *, load: bool = True) -> None:
    """Access `x` in an exchange as back-ends do that read the host's memory."""
    staged = Staged(x, load=load)
    buffer = staged.fetch()
    assert not buffer.is_cuda, "a back-end is handed the device's memory"
    buffer.mul_(2)
    staged.store()


class _StagedWork(Work):
    def __init__(self, x: Tensor) -> None:
        self._staged = Staged(x)

    def wait(self) -> None:
        buffer = self._staged.fetch()
        assert not buffer.is_cuda, "a back-end is handed the device's memory"
        buffer.mul_(2)
        self._staged.store()


class _Peers(PeerCommunicator):
    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def send(self, x: Tensor, dest: int, *, tag: int = 0) -> None:
        assert not Staged(as_bytes(x)).fetch().is_cuda

    def recv(self, x: Tensor, source: int | None = None, *, tag: int = 0) -> int:
        _exchanged(as_bytes(x), load=False)
        return 1

    def close(self) -> None:
        return None


class StagedCommunicator(Communicator):
    """The first of several ranks that exchange over the host's memory; the others do not exist.

    Args:
        size: number of ranks.
        groups: sizes of the groups that it is split into, in this order.
    """

    backend = "staged"
    reducible = Communicator.reducible | {torch.float16}

    def __init__(self, size: int, groups: Sequence[int] = ()) -> None:
        self.rank, self.size, self.local_rank, self.device = 0, size, 0, DEVICE
        self._groups = iter(groups)

    def peers(self) -> PeerCommunicator:
        return _Peers(self.size)

    def _split(self, color: int) -> Communicator:
        return StagedCommunicator(next(self._groups))

    def barrier(self) -> None:
        return None

    def close(self) -> None:
        return None

    def abort(self, exit_code: int) -> None:  # type: ignore[override]
        raise SystemExit(exit_code)

    def _allreduce_async(self, x: Tensor, name: str, op: ReduceOp) -> Work:
        return _StagedWork(x)

    def _broadcast(self, x: Tensor, name: str, root: int) -> None:
        _exchanged(as_bytes(x))

    def _allgather_bytes(self, data: bytes) -> list[bytes]:
        return [data] * self.size


def _acoustic() -> tuple[Task, Callable[[], nn.Module], Batch]:
    sizes = LstmConfig(2, 8, True, bottleneck=4, dropout=0.1)
    features, targets = torch.randn(3, FRAMES, MELS), torch.zeros(3, FRAMES, dtype=torch.int64)
    batch = Batch(features, targets, torch.full((3,), FRAMES), 3 * FRAMES)
    return AcousticTask(sizes), lambda: LstmAcousticModel(MELS, 4, sizes), batch


def _synthesis() -> tuple[Task, Callable[[], nn.Module], Batch]:
    spectrograms = torch.randn(3, FRAMES, MELS + LINEAR)
    symbols = torch.zeros(3, 4, dtype=torch.int64)
    batch = Batch(spectrograms, symbols, torch.full((3,), FRAMES), 3 * FRAMES)
    return SynthesisTask(0.1, TINY), lambda: Tacotron(SYMBOLS, MELS, LINEAR, TINY), batch


def train(task_name: str, precision_name: str, strategy: str, log: cuda.Log) -> None:
    """Take some steps, evaluate, and copy to the host what a checkpoint holds."""
    task, make_model, batch = {"acoustic": _acoustic, "synthesis": _synthesis}[task_name]()
    with DEVICE:
        model = make_model()
    graphs = Graphs.of(model, torch.device("cpu"), Repeats)
    precision = Precision(precision_name, DEVICE)  # type: ignore[arg-type]
    parsed = parse_strategy(strategy)
    # Two nodes: their ranks, then their leaders.
    of_a_node = max(1, getattr(parsed, "node_size", 0))
    comm = StagedCommunicator(2 * of_a_node, (of_a_node, 2))
    scaler = make_scaler(DEVICE) if precision.scales_losses else None
    assert scaler is None or scaler.is_enabled()
    adam = torch.optim.Adam
    replica = Replica(model, lambda p: adam(p, 0.1, fused=True), max_gradient_norm=1.0, scaler=scaler)
    attached = parsed.attach(replica, comm, Timeline(None, rank=0, device=torch.device("cpu")))
    moving = DeviceStream(DEVICE, StageTimes())
    attached.resume()
    for number in range(1, 6):
        moved = moving.move(batch).to(DEVICE)
        step = TrainingStep(attached, attached.timeline, batch.num_frames)
        step.begin()
        with precision.computing():
            loss = task.loss(model, moved)
        assert loss.total.dtype == torch.float32
        step.backward(loss.total)
        log.append(f"step {number} of {strategy}")
        step.end(Progress(number, 3.0 * FRAMES * number, 0.0, number / 5), number=number)
        if number == 2:
            assert graphs.has_new
            graphs.capture()
    with attached.evaluation_parameters(), torch.no_grad(), precision.computing():
        task.score(model.eval(), moved)
    vectors = {"parameters": replica.parameters.values, **replica.optimizer_vectors()}
    assert all(x.is_cuda and x.dtype == torch.float32 for x in vectors.values())
    state = split_state("strategy", attached.state_dict())
    for x in [*vectors.values(), *state.tensors.values()]:
        torch.empty(x.shape, dtype=x.dtype).copy_(x)
    attached.load_state_dict(attached.state_dict())
    attached.pause()
    attached.finish()
    attached.close()


def _train_all(task_name: str, precision_name: str, *strategies: str) -> None:
    for name in strategies:
        with cuda.fake_cuda() as log:
            train(task_name, precision_name, name, log)
        print("\n".join(log), flush=True)


def _in_a_fork(words: tuple[str, ...]) -> int:
    """Run it in a forked process that shares only the imports; return its exit code."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        _train_all(*words)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    with cuda.fake_cuda():
        torch.ones(1, device=DEVICE) + 1  # imports what torch does without data with
    groups = itertools.groupby(sys.argv[2:], lambda word: word != "--")
    for group in [tuple(words) for are_words, words in groups if are_words]:
        print(f"exit code {_in_a_fork(group)}\n--", flush=True)
        print("--", file=sys.stderr, flush=True)
