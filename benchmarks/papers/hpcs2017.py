"""Kaldi's way of averaging models against persistent ranks, after Rosciszewski & Kaliski (HPCS 2017).

    python benchmarks/papers/hpcs2017.py [DATA] [--frames-per-iteration 50k,150k,300k,600k,1.2m] [--jobs 2]
        [--total-frames 2.4m] [--store features|audio] [--momentum reset|keep] [--rounds 1] [--quick]
        [--out OUT] [--plot FILE] [-- options of speechdp train]

Kaldi's way (kaldi_way.py): in each iteration processes are started anew, one a job; each reads the model and
its archive, preprocesses, trains, writes its model, one thing after the other; another program reads the
models and writes their mean.  Ours: `speechdp launch -np JOBS -- train`, ranks that stay, average over MPI,
and load and preprocess beside training.  Both train on the same batches in the same order with the same
model, optimizer, learning rates and averaging points, one torch thread each, and forget the optimizer's state
at an average (--momentum keep lets our ranks keep it).  The average is plain in both.

Frames an iteration are those of ALL jobs between two averages.  Kaldi's --frames-per-iter counts those of one
job: with two jobs its 600k is our 1.2m.  Like Kaldi, the figure is a guideline: training is cut into equal
iterations whose number comes closest, and into whole epochs.

Total time is that of everything, from the first process to the end of the last, but evaluations.  The share
saved is 1 - ours / Kaldi's way.  Three more say what of it is due to what.  Most of a start is Python's
import of torch, which Kaldi's C++ programs do not have: one figure puts the 0.3 s that those need in place of
it in every iteration, leaving ours as it was; one puts 0.3 s in place of our own start, too; the last also
takes loading and preprocessing out of Kaldi's way, as if it hid all of it in the background.

Without DATA synthetic speech is prepared; with --store audio, the default then, features are computed while
training, in both.  Our ranks keep features once computed in 64 MB: a small corpus only costs them the first
epoch, and Kaldi's jobs every iteration.

OUT keeps what is finished.  Last line: JSON {"saved_at_600k": share, ...}, medians over rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import safetensors
import tyro

from benchmarks.papers import kaldi_way
from benchmarks.papers.hpcs2017_plot import draw
from benchmarks.papers.hpcs2017_results import (
    WAYS,
    Result,
    read_our_run,
    saved_shares,
    show,
    write_csv,
)
from speechdp.data.shards.dataset import Dataset
from speechdp.data.transforms.preprocess import AugmentOptions
from speechdp.experiments.jobs import JobStarter
from speechdp.launching.command import own_program
from speechdp.models.lstm_am import LstmAcousticModel
from speechdp.options.run import TrainOptions
from speechdp.tasks.model_file import MODEL_NAME, ClassCounts, save_model

SYNTHETIC_HOURS = 0.25
#: The tiny preset with half its cells; SGD, because it loses least when its state is forgotten.
DEFAULT_OPTIONS = ["--cells", "64", "--optimizer", "sgd", "--learning-rate", "0.4"]


@dataclasses.dataclass(frozen=True)
class Task:
    """What both ways train.

    Attributes:
        data: a prepared directory.
        options: of the training, resolved for the ranks.
        words: the same on the command line.
        jobs: jobs, or ranks.
        frames: in all.
    """

    data: Path
    options: TrainOptions
    words: list[str]
    jobs: int
    frames: int

    def num_iterations(self, frames: int) -> int:
        """Return in how many iterations training is cut for so many frames in each."""
        return max(1, round(self.frames / frames))

    def period_frames(self, frames: int) -> int:
        """Return the frames of a job between two averages."""
        return self.frames // (self.num_iterations(frames) * self.jobs)


def make_task(data: Path, given: argparse.Namespace) -> Task:
    """Read the options for training; the number of epochs comes from the number of frames."""
    frames = Dataset.open(data).splits["train"].frames
    epochs = max(1, round(given.total_frames / frames))
    words = [*given.options, "--epochs", str(epochs)]
    options = tyro.cli(
        TrainOptions, args=words, config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
    ).resolve(given.jobs)
    if options.augment != AugmentOptions():
        raise SystemExit("the jobs of Kaldi's way do not change their examples: leave out what augments them")
    if Dataset.open(data).stored == "audio" and options.batches().chunk_frames:
        raise SystemExit("audio is trained on in whole utterances here: give --chunk-frames 0")
    return Task(data, options, words, given.jobs, epochs * frames)


def run_ours(task: Task, frames: int, folder: Path, starter: JobStarter, momentum: str) -> Result:
    """Train with persistent ranks."""
    run_dir = folder / "run"
    strategy = f"model_averaging:period={task.period_frames(frames)}f,momentum={momentum}"
    words = ["train", str(task.data.absolute()), str(run_dir.absolute()), *task.words]
    begun_s = time.monotonic()
    message = starter.run(
        task.jobs, [*words, "--strategy", strategy, "--backend", "mpi", "--overwrite"], folder / "log.txt"
    )
    total_s = time.monotonic() - begun_s
    if message is not None:
        raise SystemExit(f"{run_dir}: {message}")
    return read_our_run(run_dir, frames, task.num_iterations(frames), total_s)


def run_kaldi(task: Task, frames: int, folder: Path, held_out: kaldi_way.HeldOutSplit) -> Result:
    """Train in Kaldi's manner and score each iteration's model afterwards."""
    exp = folder / "exp"
    setting = kaldi_way.Setting(task.data, task.options, task.jobs, task.period_frames(frames), exp)
    frames_of = kaldi_way.prepare(setting)
    begun_s = time.monotonic()
    iterations = kaldi_way.train(setting, frames_of)
    total_s = time.monotonic() - begun_s
    seconds = {name: sum(i.seconds[name] for i in iterations) for name in kaldi_way.PARTS}
    seconds["other"] += total_s - sum(seconds.values())
    curve, time_s, done = [], 0.0, 0
    for number, iteration in enumerate(iterations, start=1):
        time_s, done = time_s + iteration.total_s, done + iteration.frames
        curve.append((done, time_s, held_out.log_prob(exp / f"{number}.safetensors")))
    return Result("kaldi", frames, len(iterations), total_s, seconds, curve)


def write_run(exp: Path, like: Path, model: LstmAcousticModel) -> None:
    """Make EXP a folder that `speechdp decode` takes, with what it must know of the data from run `like`."""
    with safetensors.safe_open(str(like / MODEL_NAME), framework="np") as file:
        head = json.loads(file.metadata()["speechdp"])
        counts = ClassCounts(file.get_tensor("class_frames"), file.get_tensor("class_runs"))
    save_model(exp, model, counts, head)


def decode(run_dir: Path, data: Path, starter: JobStarter) -> float:
    """Return the word error rate of a run's model on the test part."""
    words = ["decode", str(run_dir.absolute()), str(data.absolute()), "--device", "cpu"]
    message = starter.run(1, words, run_dir.parent / "log.txt")
    if message is not None:
        raise SystemExit(f"{run_dir} cannot be decoded: {message}")
    return float(json.loads((run_dir / "wer-test.json").read_text())["wer"])


class Benchmark:
    """Runs both ways for one number of frames an iteration after the other."""

    def __init__(self, task: Task, out: Path, starter: JobStarter, momentum: str) -> None:
        self._task, self._out, self._starter, self._momentum = task, out, starter, momentum
        self._held_out = kaldi_way.HeldOutSplit(task.data, task.options)

    def pair(self, frames: int, number: int) -> list[Result]:
        """Run both ways, in turn first with every round; finished ones are read back."""
        folders = {way: self._out / f"round-{number}" / f"{way}-{frames}" for way in WAYS}
        found = {}
        for way in list(WAYS)[:: 1 if number % 2 else -1]:
            found[way] = Result.read(folders[way] / "result.json") or self._run(way, frames, folders[way])
        runs = {"ours": folders["ours"] / "run", "kaldi": folders["kaldi"] / "exp"}
        if found["kaldi"].wer is None:
            last = runs["kaldi"] / f"{found['kaldi'].iterations}.safetensors"
            write_run(runs["kaldi"], runs["ours"], self._held_out.load(last))
        for way, result in found.items():
            if result.wer is None:
                wer = decode(runs[way], self._task.data, self._starter)
                found[way] = dataclasses.replace(result, wer=wer)
                found[way].write(folders[way] / "result.json")
            print(f"round {number}: {found[way].describe()}", flush=True)
        return list(found.values())

    def _run(self, way: str, frames: int, folder: Path) -> Result:
        if folder.exists():  # begun, but not finished
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        if way == "ours":
            result = run_ours(self._task, frames, folder, self._starter, self._momentum)
        else:
            result = run_kaldi(self._task, frames, folder, self._held_out)
        result.write(folder / "result.json")
        return result


def frame_count(text: str) -> int:
    """Read 600k, 1.2m or 50000."""
    units = {"k": 1_000, "m": 1_000_000}
    unit = units.get(text[-1:].lower())
    return round(float(text) if unit is None else float(text[:-1]) * unit)


def frame_counts(text: str) -> list[int]:
    """Read several, separated by commas."""
    return [frame_count(part) for part in text.split(",")]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; what stands after `--` goes to `speechdp train`, instead of DEFAULT_OPTIONS."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="?", type=Path)
    parser.add_argument("--store", choices=["features", "audio"], help="what DATA holds, or is to hold")
    parser.add_argument("--frames-per-iteration", type=frame_counts, default="50k,150k,300k,600k,1.2m")
    parser.add_argument("--total-frames", type=frame_count, default="2.4m")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--momentum", choices=["reset", "keep"], default="reset", help="of our ranks")
    parser.add_argument("--quick", action="store_true", help="train for seconds, to see that it works")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    ours = list(arguments)
    end = ours.index("--") if "--" in ours else len(ours)
    given = parser.parse_args(ours[:end])
    given.options = ours[end + 1 :] or DEFAULT_OPTIONS
    if given.quick:
        given.frames_per_iteration, given.total_frames = [20_000, 40_000], 80_000
    return given


def open_data(given: argparse.Namespace, out: Path, starter: JobStarter) -> Path:
    """Return the data directory; without one given, synthetic speech is prepared."""
    data: Path = given.data or out / "data"
    if not (data / "data.json").is_file() and given.data is None:
        words = ["prepare", "--synthetic", str(SYNTHETIC_HOURS), "--store", given.store or "audio", str(data)]
        message = starter.run(1, words, out / "prepare.log")
        if message is not None:
            raise SystemExit(f"synthetic speech cannot be prepared: {message}")
    stored = Dataset.open(data).stored
    if given.store not in (None, stored):
        raise SystemExit(f"{data}: holds {stored}; prepare it anew with --store {given.store}")
    return data


def main() -> None:
    given = parse(sys.argv[1:])
    # As many torch threads as a job of Kaldi's has: one.
    starter = JobStarter(own_program(Path(sys.executable)), {**os.environ, "OMP_NUM_THREADS": "1"})
    with tempfile.TemporaryDirectory() as temporary:
        out = given.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        data = open_data(given, out, starter)
        benchmark = Benchmark(make_task(data, given), out, starter, given.momentum)
        results = [
            result
            for number in range(1, given.rounds + 1)
            for frames in given.frames_per_iteration
            for result in benchmark.pair(frames, number)
        ]
        write_csv(out / "hpcs2017.csv", results)
    show(results)
    if given.plot is not None:
        draw(given.plot, results)
    shares = [saved_shares(results, frames) for frames in given.frames_per_iteration]
    print(json.dumps({name: round(share, 3) for each in shares for name, share in each.items()}))


if __name__ == "__main__":
    main()
