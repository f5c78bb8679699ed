"""Minutes from transcripts to an alignment, on synthetic sentences, whose exact phone times are known.

    python benchmarks/models/alignment.py [--hours 0.2] [--seed 1] [--ranks 2] [--rounds 2] [--epochs 4]
        [--out OUT] [--methods flat-start,uniform,full-sum,exact] [-- more options of speechdp train]

Methods: flat-start: Gaussian mixtures; uniform: states spread evenly over the utterance; full-sum: the same,
and the first round learns transcripts as a whole; exact, for comparison, begins with the exact times.  After
each come --rounds rounds of --realign.  (A model of --criterion ctc has no states to align with.)  Judged is
the train split: the share of phone boundaries within 20 ms of the exact ones.  Boundaries are the begins of
phones, and their ends before silence; those of phones that the alignment lacks (another pronunciation, or
none found) are missed.  --seed is that of the sentences and their voices: choose
settings on other sentences than are reported.  Minutes are those since the command was started, the start
of the ranks included.

Last line: JSON, {"minutes_to_80_percent": by method, null where it did not get there, "within_20_ms": share
by method and alignment, "minutes": the same, "boundaries": number}.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.models.an4 import run
from speechdp.data.shards.alignment_file import open_targets, write_targets
from speechdp.data.shards.dataset import Dataset
from speechdp.data.shards.shard import Shard
from speechdp.labels.hmm import STATES_PER_PHONE, IntArray, StateInventory, flat_alignment
from speechdp.labels.lexicon import Lexicon

WITHIN_S = 0.02
ENOUGH = 0.8
#: Folder of the uniform targets.
SPREAD = "spread-evenly"
METHODS = {
    "flat-start": ["--flat-start"],
    "uniform": [],
    "full-sum": ["--realign-criterion", "full-sum"],
    "exact": [],
}
#: Methods that begin with the uniform targets instead of those in DATA.
FROM_UNIFORM = ("uniform", "full-sum")
#: The name of a phone by its place in the inventory, where silence is 0, and its first frame and end.
Phone = tuple[int, int, int]


def phones_of(targets: IntArray) -> list[Phone]:
    """Return the phones of (T,) states with their frames, silence left out.

    A phone begins wherever its states do not go on forwards.
    """
    found: list[Phone] = []
    before, frame = -1, 0
    for state, group in groupby(targets.tolist()):
        end = frame + len(list(group))
        phone = state // STATES_PER_PHONE
        if before // STATES_PER_PHONE == phone and state > before:
            found[-1] = (phone, found[-1][1], end)
        else:
            found.append((phone, frame, end))
        before, frame = state, end
    return [each for each in found if each[0] != 0]


def count_within(exact: Sequence[Phone], found: Sequence[Phone], frames: float) -> tuple[int, int]:
    """Return how many boundaries of the exact phones are found within so many frames, of how many."""
    matcher = difflib.SequenceMatcher(
        None, [phone for phone, _, _ in exact], [phone for phone, _, _ in found], autojunk=False
    )
    partner = {
        block.a + i: found[block.b + i] for block in matcher.get_matching_blocks() for i in range(block.size)
    }
    within = total = 0
    for number, (_, start, end) in enumerate(exact):
        _, found_start, found_end = partner.get(number, (0, -1e9, -1e9))
        is_followed = number + 1 < len(exact) and exact[number + 1][1] == end
        pairs = [(start, found_start), *([] if is_followed else [(end, found_end)])]
        within += sum(abs(one - other) <= frames for one, other in pairs)
        total += len(pairs)
    return within, total


def judge(data: Path, alignment: Path) -> tuple[int, int]:
    """Return how many phone boundaries of train are within 20 ms of the exact ones, of how many."""
    dataset = Dataset.open(data)
    frames = WITHIN_S / dataset.features.frame_shift_s + 1e-6
    within = total = 0
    for path in dataset.shard_paths("train"):
        with Shard(path) as shard, closing(open_targets(alignment / path.name, shard)) as targets:
            for number in range(shard.num_utterances):
                exact, found = shard.read(number)[1], targets.read(number)
                # An utterance that could not be aligned keeps its targets: here the exact ones.
                kept = bool((exact == found).all())
                counts = count_within(phones_of(exact), [] if kept else phones_of(found), frames)
                within, total = within + counts[0], total + counts[1]
    return within, total


def spread_evenly(data: Path, folder: Path) -> None:
    """Write uniform targets of train and dev."""
    dataset = Dataset.open(data)
    lexicon, inventory = Lexicon.load(dataset.lexicon_path), StateInventory.load(dataset.classes_path)
    folder.mkdir(parents=True, exist_ok=True)
    for path in (*dataset.shard_paths("train"), *dataset.shard_paths("dev")):
        with Shard(path) as shard:
            lengths = np.diff(shard.offsets).tolist()
            texts = [shard.text(number).split() for number in range(shard.num_utterances)]
            flat = [
                flat_alignment(words, n, lexicon, inventory) for words, n in zip(texts, lengths, strict=True)
            ]
            write_targets(folder / path.name, shard, flat, "flat")


def measure(data: Path, out: Path, method: str, options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Align by one method; yield each alignment's number and the minutes it was there after."""
    words = [*METHODS[method], "--realign", str(options.rounds), "--realign-epochs", str(options.epochs)]
    if method in FROM_UNIFORM:
        words += ["--alignments", str(out / SPREAD)]
    began = time.time()
    rest = ("--epochs", "1", "--overwrite", *options.train)  # the actual training is of no interest
    run(["launch", "-np", str(options.ranks), "--", "train", data, out / method, *words, *rest])
    made = (out / method / "alignments").glob("*/completed.json")
    for marker in sorted(made, key=lambda path: int(path.parent.name)):
        yield marker.parent.name, (marker.stat().st_mtime - began) / 60


def main() -> None:
    """Measure, print a line an alignment and JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hours", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--out", type=Path)
    parser.add_argument("train", nargs="*", help="options of speechdp train, after --")
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="alignment-"))
    data = out / "data"
    if not (data / "data.json").is_file():
        run(["prepare", "--synthetic", str(options.hours), "--seed", str(options.seed), data])
    spread_evenly(data, out / SPREAD)
    shares: dict[str, dict[str, float]] = {}
    minutes: dict[str, dict[str, float]] = {}
    first: dict[str, float | None] = {}
    boundaries = 0
    for method in options.methods.split(","):
        shares[method], minutes[method], first[method] = {}, {}, None
        for number, after in measure(data, out, method, options):
            within, boundaries = judge(data, out / method / "alignments" / number)
            shares[method][number], minutes[method][number] = round(within / boundaries, 3), round(after, 2)
            if within >= ENOUGH * boundaries and first[method] is None:
                first[method] = minutes[method][number]
            print(
                f"{method}, alignment {number}: {100 * within / boundaries:.1f} % of {boundaries} boundaries "
                f"within {1000 * WITHIN_S:.0f} ms, after {after:.1f} minutes",
                flush=True,
            )
    result = {"minutes_to_80_percent": first, "within_20_ms": shares, "minutes": minutes}
    print(json.dumps({**result, "boundaries": boundaries}))


if __name__ == "__main__":
    main()
