"""The subcommands of `speechdp`: where their options are, and the overview that `speechdp --help` prints."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Subcommand:
    """Where a subcommand's options are, and what `speechdp --help` says of it.

    Attributes:
        module: module of speechdp.cli.
        class_name: its dataclass of options.
        summary: one line for the overview.
        internal: options that only our own jobs and scripts give, as one word (`--job=weak-1`); `--help`
            hides them.
        refused: options of training or of the launcher that it has no use for, with what to do instead;
            `--help` hides them.
        script_class_name: the dataclass of options where `--script` is given: a training script of the
            user's, whose own arguments follow `--`; "": no such form.
    """

    module: str
    class_name: str
    summary: str
    internal: tuple[str, ...] = ()
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    script_class_name: str = ""

    def options_class(self, *, of_script: bool = False) -> type[Any]:
        """Return the dataclass of options.  Imports its module alone: others may import torch."""
        module = importlib.import_module(f"speechdp.cli.{self.module}")
        found: type[Any] = getattr(module, self.script_class_name if of_script else self.class_name)
        return found


#: Subcommands under the headings of the overview.
_OVERVIEW: dict[str, dict[str, Subcommand]] = {
    "data": {
        "prepare": Subcommand(
            "prepare",
            "PrepareCommand",
            "make a data directory from a corpus, from Kaldi's files or with eSpeak NG",
            internal=("advise",),
        ),
        "inspect": Subcommand(
            "inspect", "InspectCommand", "show what a data directory holds and verify its checksums"
        ),
        "shard": Subcommand("shard", "ShardCommand", "copy a data directory into another number of shards"),
    },
    "training": {
        "train": Subcommand(
            "train",
            "TrainCommand",
            "train a model on all ranks it is started on",
            refused=dict.fromkeys(
                ("ranks", "np", "n", "hostfile", "hosts", "nodes"),
                "it trains on the ranks it is started on: "
                "speechdp launch -np N [--hostfile FILE] -- train ...",
            ),
        ),
        "sweep": Subcommand(
            "sweep",
            "SweepCommand",
            "train with several averaging periods, decode and report",
            refused={"strategy": "use --swept, --periods and --reference"},
            script_class_name="SweepScriptCommand",
        ),
        "compare": Subcommand(
            "compare",
            "CompareCommand",
            "train with several strategies and numbers of ranks, decode and report",
            internal=("job",),
            refused={
                "strategy": "use --strategies",
                "seed": "use --seeds",
                "max_steps": "runs are compared after whole epochs",
            },
            script_class_name="CompareScriptCommand",
        ),
        "tune": Subcommand(
            "tune",
            "TuneCommand",
            script_class_name="TuneScriptCommand",
            summary="find the strategy, averaging period, back-end and batch that learn fastest",
            internal=("job", "racing", "parts"),
            refused={
                "strategy": "use --strategies",
                "backend": "use --backends",
                "seed": "use --seeds",
                "max_steps": "use --budget",
            },
        ),
        "profile": Subcommand(
            "profile",
            "ProfileCommand",
            "time every function of a training step on several numbers of ranks",
            internal=("job",),
            refused={
                "global_batch": "give --batch-size, the batch of each rank; --strong measures with a "
                "constant batch over all ranks too",
                "max_steps": "use --steps",
                "script": "it times the functions of a task's model, in training on prepared data "
                "(train --task MODULE:CLASS trains one of yours); the parts of a script's steps are shown by "
                "speechdp report FOLDER",
                **dict.fromkeys(
                    (
                        "flat_start",
                        "realign",
                        "realign_epochs",
                        "realign_criterion",
                        "realign_from",
                        "context",
                        "tied_states",
                        "average_epochs",
                    ),
                    "it measures steps of one training",
                ),
            },
        ),
        "report": Subcommand(
            "report", "ReportCommand", "show the results of a run, sweep, comparison or profile"
        ),
        "simulate": Subcommand(
            "simulate", "SimulateCommand", "predict the speed of strategies and periods on a larger cluster"
        ),
    },
    "trained models": {
        "decode": Subcommand("decode", "DecodeCommand", "recognise a split and compute the word error rate"),
        "transcribe": Subcommand(
            "transcribe", "TranscribeCommand", "recognise audio files with a trained model"
        ),
        "synthesize": Subcommand(
            "synthesize", "SynthesizeCommand", "turn texts into speech, or measure how good it is"
        ),
        "posteriors": Subcommand(
            "posteriors", "PosteriorsCommand", "write a model's scores for Kaldi's decoders"
        ),
    },
    "several ranks and hosts": {
        "launch": Subcommand(
            "launch",
            "LaunchCommand",
            "start a command on several ranks and supervise it",
            refused={"ranks": "use -np"},
        ),
        "doctor": Subcommand(
            "doctor", "DoctorCommand", "check hosts, network and folders before starting a job"
        ),
        "submit": Subcommand(
            "submit", "SubmitCommand", "submit a command as a batch job (Slurm, LSF, PBS, Grid Engine)"
        ),
    },
}
SUBCOMMANDS = {name: command for group in _OVERVIEW.values() for name, command in group.items()}


def overview() -> str:
    """Return what `speechdp --help` prints."""
    lines = ["usage: speechdp COMMAND ...", "", "Train speech models data-parallel on several ranks.", ""]
    for heading, group in _OVERVIEW.items():
        lines += [f"{heading}:", *(f"  {name:<10} {command.summary}" for name, command in group.items()), ""]
    lines += ["speechdp COMMAND --help shows a command's options; --config FILE.json gives them by a file."]
    return "\n".join(lines)
