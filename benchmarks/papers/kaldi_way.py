"""Train in the manner of Kaldi's nnet3: a driver, and for every iteration processes started anew.

In each iteration one job an archive is started, all at once; a job reads the model and its archive from disk,
trains and writes its model (kaldi_way_train.py).  When the slowest has ended, another program reads
their models and writes the mean (kaldi_way_average.py), with which the next iteration begins.

The archives hold what a rank of `speechdp train` trains on with the same options: same segments, batches,
order and learning rates, cut after the same steps.  Like Kaldi's they are planned before training begins, and
that is not timed.

What is left out of nnet3: the ramp in the number of jobs, the first iteration without an average, the final
combination, and diagnostics, which there run beside training.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

from benchmarks.models.acoustic import make_acoustic_model
from benchmarks.papers.kaldi_way_train import (
    Archive,
    make_batches,
    options_to_json,
    read_utterances,
    write_weights,
)
from speechdp.data.loading.batch import Batch
from speechdp.data.plan.epoch_plan import CorpusIndex, PlanOptions, plan_epoch
from speechdp.data.shards.dataset import Dataset
from speechdp.models.lstm_am import LstmAcousticModel
from speechdp.options.run import TrainOptions
from speechdp.tasks.acoustic import AcousticTask
from speechdp.tasks.metrics import LOG_PROB

_PROGRAMS = Path(__file__).resolve().parent
#: What an iteration's time is made up of; "start" is that of processes, their ends included.
PARTS = ("start", "read_model", "load", "preprocess", "compute", "write", "average", "wait", "other")


@dataclass(frozen=True)
class Setting:
    """One training in Kaldi's manner.

    Attributes:
        data: a prepared directory.
        options: of the training, resolved; what concerns strategy and back-end is not used.
        jobs: processes an iteration.
        period_frames: frames of a job between two averages.
        exp: folder for models, archives and logs; Kaldi's exp/.
    """

    data: Path
    options: TrainOptions
    jobs: int
    period_frames: int
    exp: Path


@dataclass(frozen=True)
class Iteration:
    """What an iteration took.

    Attributes:
        frames: trained on in it, by all jobs together.
        total_s: from the start of its first process to the end of its last.
        seconds: by PARTS, which add up to it; of what jobs do at the same time, the mean over jobs.
        loss: mean training loss of the jobs, nats a frame.
    """

    frames: int
    total_s: float
    seconds: dict[str, float]
    loss: float


def split_index(dataset: Dataset, split: str) -> CorpusIndex:
    """Index a split's utterances."""
    lengths = []
    for number in range(len(dataset.shard_paths(split))):
        with dataset.open_shard(split, number) as shard:
            lengths.append(np.diff(shard.offsets))
    return CorpusIndex.of_lengths(lengths)


def cut_into_iterations(mean_frames: Sequence[float], period_frames: float) -> list[slice]:
    """Cut steps into iterations where model averaging with this period makes its averages.

    Args:
        mean_frames: of each step, mean over ranks.
        period_frames: least number of frames per rank between averages.
    """
    result, begin, total, last = [], 0, 0.0, 0.0
    for step, frames in enumerate(mean_frames):
        total += frames
        if total - last >= period_frames:
            result.append(slice(begin, step + 1))
            begin, last = step + 1, total
    if begin < len(mean_frames):
        result.append(slice(begin, len(mean_frames)))
    return result


def prepare(setting: Setting) -> list[int]:
    """Write the first model, the archives and the configuration; return each iteration's frames."""
    dataset, options, exp = Dataset.open(setting.data), setting.options, setting.exp
    for name in ("archives", "log"):
        (exp / name).mkdir(parents=True)
    config = {"data": str(setting.data.absolute()), "options": options_to_json(options)}
    (exp / "config.json").write_text(json.dumps(config, indent=1))
    write_weights(exp / "0.safetensors", make_acoustic_model(dataset, options))
    index, schedule = split_index(dataset, options.train_split), options.schedule()
    plans = [plan_epoch(index, options.plan(), epoch, setting.jobs) for epoch in range(options.num_epochs)]
    steps = [(epoch, i) for epoch, plan in enumerate(plans) for i in range(plan.num_steps)]
    rates = [schedule.at(epoch + i / plans[epoch].num_steps) for epoch, i in steps]
    frames = np.concatenate([plan.frames for plan in plans], axis=1)  # (jobs, steps)
    iterations = cut_into_iterations(frames.mean(axis=0).tolist(), setting.period_frames)
    for number, part in enumerate(iterations):
        for job in range(setting.jobs):
            batches = [plans[epoch].ranks[job].batch(i) for epoch, i in steps[part]]
            Archive.of(batches, rates[part]).write(exp / "archives" / f"{number}.{job}.npz")
    return [int(frames[:, part].sum()) for part in iterations]


def train(setting: Setting, frames: Sequence[int]) -> list[Iteration]:
    """Run all iterations, prepared before.  Raises SystemExit where a program fails."""
    return [_iterate(setting, number, each) for number, each in enumerate(frames)]


def _iterate(setting: Setting, number: int, frames: int) -> Iteration:
    exp, jobs = setting.exp, range(setting.jobs)
    begun_s = time.monotonic()
    with ThreadPoolExecutor(setting.jobs) as pool:
        done = list(pool.map(lambda job: _run_job(exp, number, job), jobs))
    joined_s = time.monotonic()
    models = [exp / f"{number}.{job}.safetensors" for job in jobs]
    report = exp / "log" / f"{number}.average.json"
    averaged = _run("kaldi_way_average.py", report, report, exp / f"{number + 1}.safetensors", *models)
    for model in models:
        model.unlink()
    total_s = time.monotonic() - begun_s
    parts = {name: float(np.mean([each.seconds.get(name, 0.0) for each in done])) for name in PARTS}
    parts["wait"] = float(np.mean([joined_s - each.ended_s for each in done]))
    for name, value in averaged.seconds.items():
        parts[name] += value
    parts["other"] = total_s - sum(parts.values())
    return Iteration(frames, total_s, parts, float(np.mean([each.loss for each in done])))


@dataclass(frozen=True)
class _Ended:
    seconds: dict[str, float]
    ended_s: float
    loss: float


def _run_job(exp: Path, number: int, job: int) -> _Ended:
    report = exp / "log" / f"{number}.{job}.json"
    return _run("kaldi_way_train.py", report, exp, number, job, spawned_last=True)


def _run(program: str, report: Path, *arguments: object, spawned_last: bool = False) -> _Ended:
    """Run a program of ours to its end; return what it reports, its end counted as "start"."""
    words = [str(argument) for argument in arguments]
    spawned_s = time.monotonic()
    words = [*words, str(spawned_s)] if spawned_last else [str(spawned_s), *words]
    done = subprocess.run(
        [sys.executable, str(_PROGRAMS / program), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    ended_s = time.monotonic()
    if done.returncode != 0:
        raise SystemExit(f"{program} {' '.join(words)} ended with {done.returncode}\n{done.stderr}")
    values = json.loads(report.read_text())
    seconds = values["seconds"]
    seconds["start"] += ended_s - values["done_s"]
    return _Ended(seconds, ended_s, values.get("loss", 0.0))


class HeldOutSplit:
    """A split to score models on, read once."""

    def __init__(self, data: Path, options: TrainOptions) -> None:
        dataset = Dataset.open(data)
        plan = options.plan()
        whole = PlanOptions(4 * plan.batch_size, plan.chunk_frames, seed=0)
        part = plan_epoch(split_index(dataset, options.held_out), whole, 0, 1).ranks[0]
        batches = [part.batch(i) for i in range(part.num_batches)]
        archive = Archive.of(batches, [0.0] * len(batches))
        raw = read_utterances(dataset, options.held_out, archive, options.alignments)
        self._batches: list[Batch] = make_batches(dataset, options, archive, raw)
        self._model = make_acoustic_model(dataset, options)

    def log_prob(self, weights: Path) -> float:
        """Return the mean log-probability of the aligned class, nats a frame, of a model on disk."""
        model = self.load(weights)
        scores = [AcousticTask().score(model, batch) for batch in self._batches]
        return sum(s.sums[LOG_PROB.key] for s in scores) / sum(s.num_frames for s in scores)

    def load(self, weights: Path) -> LstmAcousticModel:
        """Return a model on disk, ready to be used; the next call overwrites it."""
        self._model.load_state_dict(safetensors.torch.load_file(weights))
        torch.set_num_threads(1)
        return self._model.eval()
