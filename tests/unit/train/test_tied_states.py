"""Training on states in context: their targets, by any number of ranks, the model, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from speechdp.cli.main import run as speechdp
from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.shards.alignment_file import open_targets
from speechdp.data.shards.dataset import Dataset
from speechdp.data.shards.shard import Shard
from speechdp.errors import ConfigError, ShardError
from speechdp.experiments.arguments import train_arguments
from speechdp.labels.hmm import FloatArray, IntArray, StateInventory
from speechdp.labels.state_tying import TYING_NAME, contexts_of, tying_in
from speechdp.options.batch import BatchOptions
from speechdp.options.optimizer import OptimizerOptions
from speechdp.options.run import ModelOptions, TrainOptions
from speechdp.parallel.run_files import MODEL_NAME, RunDirectory
from speechdp.parallel.stop import StopRequest
from speechdp.process.ending import Stopped
from speechdp.tasks.model_file import load_model
from speechdp.train.models import load_initial_weights, make_model
from speechdp.train.realign import last_alignment, make_alignments, train_with_realignment
from speechdp.train.session import Session
from tests.helpers.spoken_states import write_spoken

CPU = torch.device("cpu")
SMALL = ModelOptions(layers=1, cells=24, dropout=0.0)
OPTIONS = TrainOptions(
    SMALL, BatchOptions(batch_size=8), OptimizerOptions("adam", learning_rate=0.02), epochs=12, context="both"
)
SOUNDS = np.random.default_rng(6).normal(0, 2.0, (3, 80, 20))


def sounds_in_context(states: IntArray) -> FloatArray:
    """Let a state sound as it and its neighbours say, the nearer of them most."""
    at = contexts_of(states)
    return np.asarray(SOUNDS[0, states] + SOUNDS[1, at.left] + 0.5 * SOUNDS[2, at.right], np.float32)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = tmp_path_factory.mktemp("exact") / "data"
    return write_spoken(path, 240, alignment="exact", sound_of=sounds_in_context)[0]


def session(dataset: Dataset, comm: Communicator | None = None) -> Session:
    return Session(dataset, comm or SerialCommunicator(), CPU)


def targets_in(dataset: Dataset, folder: Path | None) -> Iterator[IntArray]:
    for split in ("train", "dev"):
        for path in dataset.shard_paths(split):
            with Shard(path) as shard:
                if folder is None:
                    yield from (shard.read(u)[1] for u in range(shard.num_utterances))
                    continue
                with closing(open_targets(folder / path.name, shard)) as targets:
                    yield from (targets.read(u) for u in range(shard.num_utterances))


def test_targets_are_those_without_context_tied(exact: Dataset, tmp_path: Path) -> None:
    folder = make_alignments(session(exact), OPTIONS, tmp_path)
    assert folder == tmp_path / "alignments" / "tied" and RunDirectory(folder).is_complete
    tying = tying_in(folder)
    assert tying is not None and tying.num_classes > exact.num_classes + 5
    for tied, states in zip(targets_in(exact, folder), targets_in(exact, None), strict=True):
        np.testing.assert_array_equal(tied, tying.tied(states))
    written = (folder / TYING_NAME).stat().st_mtime_ns
    make_alignments(session(exact), OPTIONS, tmp_path)  # what is done is not done again
    assert (folder / TYING_NAME).stat().st_mtime_ns == written
    with pytest.raises(ConfigError, match=r"other options \(--context both --tied-states 1000\)"):
        make_alignments(session(exact), dataclasses.replace(OPTIONS, context="left"), tmp_path)


def test_any_number_of_ranks_grows_the_same_trees(exact: Dataset, tmp_path: Path) -> None:
    make_alignments(session(exact), OPTIONS, tmp_path / "1")
    # More ranks than shards: some have seen nothing.
    run_threads(5, lambda comm: make_alignments(session(exact, comm), OPTIONS, tmp_path / "5"))
    trees = [(tmp_path / n / "alignments/tied" / TYING_NAME).read_text() for n in ("1", "5")]
    assert trees[0] == trees[1]


def test_all_ranks_stop_where_one_is_asked(exact: Dataset, tmp_path: Path) -> None:
    def on_rank(comm: Communicator) -> bool:
        stop = StopRequest()
        if comm.rank == 1:
            stop.received = "SIGTERM"
        with pytest.raises(Stopped):
            make_alignments(Session(exact, comm, CPU, stop=stop), OPTIONS, tmp_path)
        return True

    assert run_threads(2, on_rank) == [True, True]
    assert not (tmp_path / "alignments/tied/completed.json").exists()


@pytest.mark.parametrize(
    ("context", "criterion"), [("left", None), ("both", None), ("left", "full-sum"), ("both", "full-sum")]
)
def test_a_model_of_states_in_context_recognises(
    exact: Dataset, tmp_path: Path, context: str, criterion: Any
) -> None:
    """What it was trained for is in its file: decoding needs no option, nor do posteriors."""
    model = dataclasses.replace(SMALL, criterion=criterion)
    options = dataclasses.replace(OPTIONS, context=context, model=model)
    train_with_realignment(session(exact), options, tmp_path / "run")
    tying = tying_in(tmp_path / "run/alignments/tied")
    trained = load_model(tmp_path / "run", CPU)
    assert tying is not None and trained.tying is not None
    assert trained.tying.to_json() == tying.to_json()
    assert trained.model.output.out_features == len(trained.self_loop) == tying.num_classes
    counts = sum(
        np.bincount(t, minlength=tying.num_classes)
        for t in targets_in(exact, tmp_path / "run/alignments/tied")
    )
    assert ((np.asarray(counts) > 0) >= (trained.class_log_prior.numpy() < 0)).all()
    data, run = str(exact.path), str(tmp_path / "run")
    assert speechdp(["decode", run, data, "--split", "dev", "--backend", "serial"]) == 0
    record = json.loads((tmp_path / "run/wer-dev.json").read_text())
    assert record["wer"] < 0.05, record
    archive = tmp_path / "scores.ark"
    assert speechdp(["posteriors", run, data, "-o", str(archive), "--split", "dev"]) == 0
    frames = exact.num_frames("dev")
    assert 4 * frames * tying.num_classes < archive.stat().st_size < 4.2 * frames * tying.num_classes


def test_another_run_trains_on_the_same_targets(exact: Dataset, tmp_path: Path) -> None:
    folder = make_alignments(session(exact), OPTIONS, tmp_path)
    assert folder is not None
    again = dataclasses.replace(OPTIONS, context="none", alignments=folder, epochs=1)
    train_with_realignment(session(exact), again, tmp_path / "run")
    found, tying = load_model(tmp_path / "run", CPU).tying, tying_in(folder)
    assert found is not None and tying is not None and found.num_classes == tying.num_classes
    for options in (
        dataclasses.replace(again, context="left"),
        dataclasses.replace(again, realign=1),
        dataclasses.replace(again, model=dataclasses.replace(SMALL, criterion="ctc")),
    ):
        with pytest.raises(ConfigError, match="states in context"):
            train_with_realignment(session(exact), options, tmp_path / "other")
    (folder / TYING_NAME).write_text("{}")
    with pytest.raises(ConfigError, match=r"tying\.json: damaged .*; delete .* and make it again"):
        train_with_realignment(session(exact), again, tmp_path / "other")
    (folder / TYING_NAME).unlink()  # as the targets of other data, then
    with pytest.raises(ShardError, match=r"has targets of \d+ classes, its folder is of 48"):
        train_with_realignment(session(exact), again, tmp_path / "other")


def test_what_has_no_alignment_is_not_tied(tmp_path: Path) -> None:
    flat = write_spoken(tmp_path / "data", 8)[0]
    with pytest.raises(ConfigError, match=r"--context both: .*; add --flat-start") as error:
        make_alignments(session(flat), OPTIONS, tmp_path / "run")
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_sizes_are_refused_before_any_alignment(exact: Dataset, tmp_path: Path) -> None:
    few = dataclasses.replace(OPTIONS, tied_states=3, realign=1)
    with pytest.raises(ConfigError, match="--tied-states 3: there are "):
        make_alignments(session(exact), few, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_of_other_tied_states_is_no_beginning(exact: Dataset, tmp_path: Path) -> None:
    train_with_realignment(session(exact), dataclasses.replace(OPTIONS, epochs=1), tmp_path / "run")
    plain = dataclasses.replace(OPTIONS, epochs=1, context="none", initial_model=tmp_path / "run")
    with pytest.raises(ConfigError, match="its context-dependent states are not those to be trained"):
        train_with_realignment(session(exact), plain, tmp_path / "other")
    own = dataclasses.replace(plain, alignments=tmp_path / "run" / "alignments" / "tied")
    train_with_realignment(session(exact), own, tmp_path / "next")


def test_classes_begin_with_what_their_state_has_learnt(exact: Dataset, tmp_path: Path) -> None:
    """The posteriors of a state's classes add up to that of the state in the model without context."""
    # One of its layers has as many rows as there are states, but not one for each of them.
    states = StateInventory.load(exact.classes_path).num_classes
    untied = dataclasses.replace(
        OPTIONS,
        epochs=1,
        context="none",
        tied_states=None,
        model=ModelOptions(layers=1, cells=6, bottleneck=states),
    )
    train_with_realignment(session(exact), untied, tmp_path / "untied")
    make_alignments(session(exact), OPTIONS, tmp_path / "run")
    tied = tmp_path / "run" / "alignments" / "tied"
    options = dataclasses.replace(untied, alignments=tied, initial_model=tmp_path / "untied")
    model = make_model(exact, options)
    load_initial_weights(model, exact, options)
    before = load_model(tmp_path / "untied", torch.device("cpu")).model
    features = torch.randn(2, 9, exact.feature_dim, generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([9, 7])
    with torch.no_grad():
        wanted, found = (m.eval()(features, lengths).softmax(-1) for m in (before, model))
    tying = tying_in(tied)
    assert tying is not None and found.shape[-1] == tying.num_classes > states == wanted.shape[-1]
    sums = torch.zeros_like(wanted).index_add_(2, torch.from_numpy(tying.states).long(), found)
    torch.testing.assert_close(sums, wanted, atol=1e-6, rtol=1e-5)
    train_with_realignment(session(exact), options, tmp_path / "next")


def test_rounds_are_carried_on_with_context(exact: Dataset, tmp_path: Path) -> None:
    once = dataclasses.replace(OPTIONS, realign_epochs=2, max_steps=1, realign=1)
    options = dataclasses.replace(once, realign_from="throughout")
    train_with_realignment(session(exact), options, tmp_path / "run")
    train_with_realignment(session(exact), once, tmp_path / "anew")
    tied = [tying_in(tmp_path / name / "alignments" / "tied") for name in ("run", "anew")]
    assert tied[0] is not None and tied[1] is not None and tied[0].to_json() == tied[1].to_json()
    round_, run, anew = (
        load_model(path, CPU).model.state_dict()
        for path in (tmp_path / "run" / "realign" / "1", tmp_path / "run", tmp_path / "anew")
    )
    of_states = torch.from_numpy(tied[0].states).long()
    # One step of Adam moves a weight by its learning rate at most, in each of the two.
    step = 2 * 0.02 + 1e-4
    assert (run["output.weight"] - round_["output.weight"][of_states]).abs().max() < step
    assert (run["output.weight"] - anew["output.weight"]).abs().max() > step


@pytest.mark.parametrize("resume", [False, True])
def test_a_model_with_context_is_refused_before_any_alignment(
    exact: Dataset, tmp_path: Path, resume: bool
) -> None:
    """Also where the command says --resume; and what the message advises is taken."""
    once = dataclasses.replace(OPTIONS, epochs=1)
    train_with_realignment(session(exact), once, tmp_path / "tied")
    options = dataclasses.replace(once, flat_start=True, initial_model=tmp_path / "tied")
    with pytest.raises(ConfigError, match="leave out --flat-start and --context and give --alignments"):
        train_with_realignment(session(exact), options, tmp_path / "run", resume=resume)
    assert not (tmp_path / "run").exists()
    advised = dataclasses.replace(
        options, flat_start=False, context="none", alignments=tmp_path / "tied" / "alignments" / "tied"
    )
    train_with_realignment(session(exact), advised, tmp_path / "run")


def test_options_that_do_not_go_with_it() -> None:
    for options in (
        {"tied_states": 9},
        {"tied_states": 0, "context": "left"},
        {"task": "synthesis", "context": "left"},
    ):
        with pytest.raises(ConfigError, match=r"--tied-states|--context"):
            TrainOptions(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--context: not with --criterion ctc"):
        TrainOptions(ModelOptions(criterion="ctc"), context="left")
    full_sum = TrainOptions(ModelOptions(criterion="full-sum"), flat_start=True, context="left")
    with pytest.raises(ConfigError, match="--flat-start: not with --criterion full-sum"):
        dataclasses.replace(full_sum, context="none")  # nothing would use the alignment
    with pytest.raises(ConfigError, match="--realign: not with --criterion full-sum"):
        dataclasses.replace(full_sum, realign=1)
    TrainOptions(context="both", realign=1, realign_criterion="full-sum")


def test_experiments_tie_once_and_train_on_that(tmp_path: Path) -> None:
    options = TrainOptions(realign=2, context="both", tied_states=400)
    for name in ("1", "2", "tied"):
        (tmp_path / "alignments" / name).mkdir(parents=True)
        (tmp_path / "alignments" / name / "completed.json").touch()
    assert last_alignment(tmp_path, options).name == "tied"
    assert options.aligning == ("--realign", "--context")
    assert {"--context=both", "--tied-states=400"} <= set(train_arguments(options))
    run = options.on_alignments(Path("OUT/alignment/alignments/tied"))
    assert not run.aligns and run == TrainOptions(alignments=run.alignments)


def test_a_damaged_head_is_one_line(exact: Dataset, tmp_path: Path) -> None:
    train_with_realignment(session(exact), dataclasses.replace(OPTIONS, epochs=1), tmp_path)
    content = (tmp_path / MODEL_NAME).read_bytes()
    assert content.count(b'\\"context\\": \\"both\\"') == 1
    (tmp_path / MODEL_NAME).write_bytes(
        content.replace(b'\\"context\\": \\"both\\"', b'\\"context\\": \\"left\\"')
    )
    with pytest.raises(Exception, match="damaged") as error:
        load_model(tmp_path, CPU)
    assert "\n" not in str(error.value)
