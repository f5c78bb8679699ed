"""One, 4 and 20 learners on one machine at equal frames: which strategies keep the accuracy of one.

    python benchmarks/strategies/learners.py DATA [--alignments DIR] [--learners 4,20] [--strategies LIST]
        [--seeds 1,2]

After Cong et al. 2017 (MLHPC; only the abstract was read): asynchronous SGD falls behind with 4 learners
already, K-step averaging (K-AVG) keeps the sequential accuracy with 4, with adaptive measures with 20.  Here
every learner takes batches of the same size at the same learning rate (SGD, momentum 0.9), all learners
together the same epochs over the same frames, so N learners make 1/N of the steps each.  The learning rate
is the best of 0.05, 0.1 and 0.2 for one learner (`--scan`, 6 epochs, seed 1, dev).  Learners share the
machine's cores, one thread each: what is compared is the model at the end, not the time.
Last line: JSON with the means over the seeds and, for each, its log-probability less that of one learner.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.strategies import trials
from benchmarks.strategies.trials import Outcome, Trial
from speechdp.experiments.compare.plan import split_strategies
from speechdp.options.batch import BatchOptions
from speechdp.options.optimizer import OptimizerOptions
from speechdp.options.recipe import RECIPES
from speechdp.parallel.registry import StrategyChoice

#: Plain SGD, on one rank.
SEQUENTIAL = "gradient_averaging"
STRATEGIES = (
    "model_averaging:period=8,adaptive_averaging:period=8,interval=32,learning_rate=scale,"
    "parameter_server:mode=async"
)


def make_trials(arguments: argparse.Namespace, alignments: Path) -> list[Trial]:
    """Return the trials of a job: plain SGD on one rank, else every strategy, with every seed."""
    anneal_from = math.ceil(RECIPES["adpsgd-asr"].warmup_share * arguments.epochs)
    options = dataclasses.replace(
        trials.base_options(arguments),
        batch=BatchOptions(batch_size=arguments.batch),
        optimizer=OptimizerOptions(
            "sgd",
            learning_rate=arguments.learning_rate,
            momentum=arguments.momentum,
            anneal_from=anneal_from,
        ),
        alignments=alignments,
    )
    if arguments.scan:
        return trials.scan_trials(SEQUENTIAL, options, arguments.scan)
    names = [SEQUENTIAL] if arguments.on_ranks == 1 else split_strategies(arguments.strategies)
    return [
        Trial(name, dataclasses.replace(options, strategy=StrategyChoice(name), seed=seed))
        for seed in trials.seeds(arguments)
        for name in names
    ]


def conclude(outcomes: list[Outcome]) -> dict[str, dict[str, float]]:
    """Return the last line: each configuration's means, and how far it is from one learner."""
    result = {
        f"{name} x {ranks}": trials.figures(same) for (name, ranks), same in trials.grouped(outcomes).items()
    }
    alone = result[f"{SEQUENTIAL} x 1"]["log_prob"]
    for values in result.values():
        values["log_prob_less_one_learner"] = round(values["log_prob"] - alone, 4)
    return result


def main() -> None:
    """Run a job for each number of learners, print the table and the last line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # MPI: with 20 ranks on 2 cores its exchanges wait least (docs/communicators.md).
    trials.add_arguments(parser, seeds="1,2", backend="mpi", cells=32)
    parser.add_argument("--learners", default="4,20", help="numbers of ranks, beside 1")
    parser.add_argument("--strategies", default=STRATEGIES, help="as for `speechdp compare`")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=4, help="segments of a learner and step")
    parser.add_argument("--learning-rate", type=float, default=0.1, help="that suits one learner")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--decode-split", default="", help="split whose word error rate is shown")
    arguments = parser.parse_args()
    if arguments.on_ranks:
        split = arguments.decode_split
        sys.exit(trials.on_ranks(arguments, lambda a: make_trials(arguments, a), decode_split=split))
    outcomes: list[Outcome] = []
    sizes = [1, *map(int, arguments.learners.split(","))][: 1 if arguments.scan else None]
    with trials.output_folder(arguments) as folder:
        again = [*sys.argv[1:], "--out", str(folder)]
        for size in sizes:
            outcomes += trials.run_job(size, again, arguments.timeout_s)
    print(trials.table(outcomes))
    if arguments.scan:
        return
    print(json.dumps(conclude(outcomes)))


if __name__ == "__main__":
    main()
