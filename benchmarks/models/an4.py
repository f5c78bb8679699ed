"""Word errors on AN4's official test part: from a Kaldi data directory to one number.

    python benchmarks/models/an4.py AN4_FOLDER [--ranks 2] [--seeds 1,2,3] [--epochs 40] [--out OUT]
        [--dev-only] [-- more options of speechdp train]

AN4_FOLDER holds wav.scp, text, utt2spk, lexicon.txt and `split`, the official test speakers in the form of
`prepare --split`.  Every tenth of the other speakers, in alphabetical order from the fourth on, is the dev
part.  For each seed a model is trained (--flat-start), `decode --tune-on dev` chooses the scales on dev, and
test is decoded once.  OUT keeps what is done: the same command goes on.  To choose settings of training, use
--dev-only, which does not decode test.

Last line: JSON, {"wer": percent, mean of the seeds, "wer_seeds": of each, "wer_dev_seeds": as tuned,
"training_minutes": mean, alignment included; null where OUT had the model already}.  With --dev-only without
"wer" and "wer_seeds".
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.strategies.paired import REPOSITORY
from speechdp.comm.serial import SerialCommunicator
from speechdp.data.shards.dataset import Dataset
from speechdp.decode.recogniser import DecodingOptions, Normalise
from speechdp.decode.tuning import tune
from speechdp.launching.command import own_program
from speechdp.tasks.model_file import load_model

TRAINING = ("--flat-start", "--context", "both", "--batch-size", "6", "--spec-augment", "--speed-perturb")
LM_ORDER = "5"  # perplexity on dev 17.9; 19.5 with 3, 18.9 with 4
NORMALISE: Normalise = "speaker"


def split_of(corpus: Path) -> str:
    """Return the rule that divides the corpus: the official test speakers, and some others as dev."""
    official = (corpus / "split").read_text(encoding="utf-8").split()[0]
    test = set(official.partition("=")[2].split("+"))
    table = (corpus / "utt2spk").read_text(encoding="utf-8").splitlines()
    others = sorted({line.split()[1] for line in table} - test)
    return f"{official},dev={'+'.join(others[3::10])}"


def run(arguments: Sequence[str | Path]) -> None:
    """Run a command of speechdp.  Raises CalledProcessError."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run(
        [*own_program(Path(sys.executable)), *map(str, arguments)],
        check=True,
        env=environment,
        stdout=sys.stderr,
    )


def prepare(corpus: Path, data: Path) -> None:
    """Make the data directory, unless it is there."""
    if not (data / "data.json").is_file():
        lexicon = ("--lexicon", corpus / "lexicon.txt")
        store = ("--store", "audio", "--lm-order", LM_ORDER)
        run(["prepare", corpus, data, "--split", split_of(corpus), *lexicon, *store])


def train(data: Path, run_dir: Path, seed: int, options: argparse.Namespace) -> float | None:
    """Train a model, or go on; return the minutes it took, None if it was there."""
    if (run_dir / "completed.json").is_file():
        return None
    began = time.monotonic()
    settings = (*TRAINING, "--epochs", str(options.epochs), "--seed", str(seed), "--resume", *options.train)
    run(["launch", "-np", str(options.ranks), "--", "train", data, run_dir, *settings])
    return (time.monotonic() - began) / 60


def word_errors(data: Path, run_dir: Path) -> tuple[float, float]:
    """Decode test once, tuned on dev, unless that is done; return WER on test and on dev, percent."""
    record = run_dir / "wer-test.json"
    if not record.is_file():
        judged = ["--tune-on", "dev", "--split", "test", "--normalise", NORMALISE]
        run(["decode", run_dir, data, *judged, "--backend", "serial"])
    found = json.loads(record.read_text(encoding="utf-8"))
    tuning = found["tuning"]
    return 100 * found["wer"], 100 * tuning["errors"] / tuning["words"]


def word_errors_on_dev(data: Path, run_dir: Path) -> float:
    """Return the WER on dev with the settings that are best there, percent."""
    trained = load_model(run_dir, torch.device("cpu"))
    options = DecodingOptions(normalise=NORMALISE)
    tuned = tune(trained, Dataset.open(data), "dev", options, SerialCommunicator())
    print(tuned.summary(), file=sys.stderr, flush=True)
    return float(100 * tuned.record["errors"] / tuned.record["words"])


def main() -> None:
    """Measure, print a line a seed and JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dev-only", action="store_true")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:end])
    options.train = words[end + 1 :]
    out = options.out or Path(tempfile.mkdtemp(prefix="an4-"))
    out.mkdir(parents=True, exist_ok=True)
    data = out / "data"
    prepare(options.corpus, data)
    test, dev, minutes = [], [], []
    for seed in map(int, options.seeds.split(",")):
        run_dir = out / f"seed-{seed}"
        minutes.append(train(data, run_dir, seed, options))
        if options.dev_only:
            dev.append(round(word_errors_on_dev(data, run_dir), 2))
            print(f"seed {seed}: WER {dev[-1]:.2f} % on dev", flush=True)
            continue
        errors = word_errors(data, run_dir)
        test.append(round(errors[0], 2))
        dev.append(round(errors[1], 2))
        print(f"seed {seed}: WER {test[-1]:.2f} % on test, {dev[-1]:.2f} % on dev", flush=True)
    measured = [m for m in minutes if m is not None]
    judged = {} if options.dev_only else {"wer": round(sum(test) / len(test), 2), "wer_seeds": test}
    result = {
        **judged,
        "wer_dev_seeds": dev,
        "training_minutes": round(sum(measured) / len(measured), 1) if measured else None,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
