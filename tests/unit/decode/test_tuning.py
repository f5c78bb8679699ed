"""decode --tune-on: settings chosen on one split, used on another."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import re
from pathlib import Path

import pytest
import torch

from speechdp.cli.decode import DecodeCommand
from speechdp.cli.synthesize import SynthesizeCommand
from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.shards.dataset import Dataset
from speechdp.decode import tuning
from speechdp.decode.graphs.graph import Grammar
from speechdp.decode.language_model import save_language_model
from speechdp.decode.recogniser import DecodingOptions, Normalise, Recogniser
from speechdp.decode.search import BestPath, Searcher
from speechdp.decode.split import decode_split
from speechdp.decode.tuning import earlier_tuning, tune
from speechdp.errors import RunError, ShardError
from speechdp.labels.hmm import FloatArray, StateInventory, states_of
from speechdp.labels.lexicon import Lexicon
from speechdp.language.kneser_ney import estimate
from speechdp.options.recognition import RecognitionOptions
from speechdp.process.ending import Stopped
from speechdp.synthesis.recognition import SpeechListener
from tests.helpers.oracle import Oracle, OracleModel, Spoken, oracle, write_dataset

LEARNT_LITTLE = "the model has learnt little, or there is no speech in these recordings"
#: What is said twice is meant once: more costly words (or a smaller acoustic scale) are right.
SHARDS = [
    [Spoken("a", "one", "one one"), Spoken("b", "two", "two two", 44), Spoken("c", "one two", "one two", 50)],
    [Spoken("d", "two", "two two", 48), Spoken("e", "four", "four", 30)],
]


@pytest.fixture(autouse=True)
def no_setting_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no line tell of a setting that takes long, as each may on a busy machine."""
    monkeypatch.setattr(tuning, "_SILENCE_S", math.inf)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return write_dataset(tmp_path / "data", SHARDS, "dev")


def unsure(num_classes: int) -> Oracle:
    """A model that is not sure, so that costs of words matter."""
    sure = oracle(num_classes)
    model = OracleModel(num_classes, confidence=1.0)
    return Oracle(model, sure.class_log_prior, sure.self_loop, sure.config)


def add_language_model(dataset: Dataset) -> None:
    texts = [["one"], ["two"], ["one", "two"], ["two"], ["four"]]
    save_language_model(estimate(texts, 2, ["one", "two", "four"]), dataset.path)


@pytest.mark.parametrize("grammar", [None, Grammar.WORD_LOOP, Grammar.TRANSCRIPT_SET])
def test_the_best_setting_is_found_and_does_what_it_promises(
    dataset: Dataset, tmp_path: Path, grammar: Grammar | None
) -> None:
    add_language_model(dataset)
    model, comm, start = unsure(dataset.num_classes), SerialCommunicator(), DecodingOptions(grammar=grammar)
    tuned = tune(model, dataset, "dev", start, comm)
    tried = {
        None: {"acoustic_scale", "prior_scale", "lm_scale", "insertion_log_prob"},
        Grammar.WORD_LOOP: {"acoustic_scale", "prior_scale", "insertion_log_prob"},
        Grammar.TRANSCRIPT_SET: {"acoustic_scale", "prior_scale"},
    }[grammar]
    assert set(tuned.record["chosen"]) == tried
    result = decode_split(model, dataset, "dev", tmp_path / "run", tuned.options, comm, tuning=tuned.record)
    errors = result.wer.insertions + result.wer.deletions + result.wer.substitutions
    assert errors == tuned.record["errors"] == min(trial["errors"] for trial in tuned.record["trials"])
    assert errors <= tuned.record["trials"][0]["errors"]
    values = json.loads((tmp_path / "run" / "wer-dev.json").read_text())
    assert values["tuning"] == tuned.record
    assert values["grammar"] == (grammar or Grammar.NGRAM).value
    assert values["graph"]["determinised"]
    for name in tried:
        assert values["options"][name] == tuned.record["chosen"][name]


def test_tuning_helps_where_words_are_inserted(tmp_path: Path) -> None:
    right = [[Spoken("a", "one two", "one two", 60), Spoken("b", "four", "four", 50)]]
    dataset = write_dataset(tmp_path / "data", right, "dev")
    start = DecodingOptions(grammar=Grammar.WORD_LOOP, insertion_log_prob=20.0)
    tuned = tune(unsure(dataset.num_classes), dataset, "dev", start, SerialCommunicator())
    before = next(
        t
        for t in tuned.record["trials"]
        if (t["acoustic_scale"], t["prior_scale"], t["insertion_log_prob"]) == (1.0, 1.0, 20.0)
    )
    assert tuned.record["errors"] < before["errors"]
    assert tuned.summary().startswith("tuned on dev: acoustic-scale ")


def test_priors_that_mislead_are_found_out(tmp_path: Path) -> None:
    """Divided out, they make the phones of `four` likely everywhere, which the network knows nothing of."""
    right = [[Spoken("a", "one two", "one two", 60), Spoken("b", "two", "two"), Spoken("c", "four", "four")]]
    dataset = write_dataset(tmp_path / "data", right, "dev")
    model, comm = unsure(dataset.num_classes), SerialCommunicator()
    inventory = StateInventory.load(dataset.classes_path)
    model.class_log_prior[states_of(["F", "AO", "R"], inventory)] -= 1.5
    tuned = tune(model, dataset, "dev", DecodingOptions(grammar=Grammar.WORD_LOOP), comm)
    assert tuned.options.prior_scale < 1 and tuned.record["errors"] == 0
    result = decode_split(model, dataset, "dev", tmp_path / "run", tuned.options, comm)
    assert result.wer.wer == 0


@pytest.mark.parametrize(
    ("values", "edges"),
    [
        ((-2.0, 0.0, 2.0), {}),
        ((0.0, 2.0), {"insertion_log_prob": "smallest"}),
        ((-2.0, -1.0), {"insertion_log_prob": "largest"}),
    ],
)
def test_a_best_value_at_the_edge_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: tuple[float, ...], edges: dict[str, str]
) -> None:
    dataset = write_dataset(tmp_path / "data", [[Spoken("a", "four", "four")]], "dev")
    monkeypatch.setitem(tuning._VALUES, "insertion_log_prob", values)
    start = DecodingOptions(grammar=Grammar.WORD_LOOP, insertion_log_prob=max(values, key=lambda v: -abs(v)))
    tuned = tune(oracle(dataset.num_classes), dataset, "dev", start, SerialCommunicator())
    assert tuned.record["at_edge"] == edges
    told = {
        "smallest": "; no smaller --insertion-log-prob than",
        "largest": "; no larger --insertion-log-prob",
    }
    assert all(told[edge] in tuned.summary() for edge in edges.values())
    assert ("was tried" in tuned.summary()) == bool(edges)


def test_where_nothing_helps_nothing_is_changed(tmp_path: Path) -> None:
    right = [[Spoken("a", "one two", "one two", 60), Spoken("b", "four", "four")]]
    dataset = write_dataset(tmp_path / "data", right, "dev")
    start = DecodingOptions(acoustic_scale=0.77, insertion_log_prob=-0.1)
    tuned = tune(oracle(dataset.num_classes), dataset, "dev", start, SerialCommunicator())
    assert tuned.options == start and tuned.record["errors"] == 0


@pytest.mark.parametrize("size", [2, 4, 7])
def test_any_number_of_ranks_chooses_the_same(dataset: Dataset, size: int) -> None:
    add_language_model(dataset)
    alone = tune(unsure(dataset.num_classes), dataset, "dev", DecodingOptions(), SerialCommunicator())
    results = run_threads(
        size, lambda comm: tune(unsure(dataset.num_classes), dataset, "dev", DecodingOptions(), comm)
    )
    assert all(result == alone for result in results)


def test_each_setting_is_told_once_and_by_one_rank(dataset: Dataset) -> None:
    def run(comm: Communicator) -> tuple[list[str], int]:
        told: list[str] = []
        tuned = tune(
            unsure(dataset.num_classes), dataset, "dev", DecodingOptions(), comm, print_line=told.append
        )
        return told, len(tuned.record["trials"])

    (told, num_trials), (others, _) = run_threads(2, run)
    assert len(told) == num_trials > 10 and not others
    assert re.fullmatch(r"tuning on dev: acoustic-scale 1: \d+\.\d % WER", told[0])


def test_the_way_ends_where_three_values_in_a_row_are_worse(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    above = {0.5: 4, 1.0: 5, 2.0: 1, 3.0: 1, 4.0: 2, 6.0: 2, 8.0: 3, 9.0: 0}
    costs = {-4.0: 0, -2.0: 8, -1.0: 7, -0.5: 3, 0.0: 5, **above}
    seen: list[float] = []

    def errors(_trials: object, options: DecodingOptions, name: str) -> int:
        if name == "insertion_log_prob":
            seen.append(options.insertion_log_prob)
        return costs[options.insertion_log_prob]

    monkeypatch.setattr(tuning._Trials, "errors", errors)
    monkeypatch.setitem(tuning._VALUES, "insertion_log_prob", tuple(costs))
    start = DecodingOptions(grammar=Grammar.WORD_LOOP, insertion_log_prob=0.0)
    tuned = tune(unsure(dataset.num_classes), dataset, "dev", start, SerialCommunicator())
    # Upwards a worse one and one as good are passed; three worse ones end the ways before 9 and -4.
    assert tuned.options.insertion_log_prob == 2.0
    assert seen[:12] == [0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, -0.5, -1.0, -2.0, 2.0]


@pytest.mark.parametrize("size", [1, 2])
def test_of_a_model_that_has_learnt_nothing_one_setting_is_tried(
    dataset: Dataset, tmp_path: Path, size: int
) -> None:
    sure = oracle(dataset.num_classes)
    same_everywhere = dataclasses.replace(sure, model=OracleModel(dataset.num_classes, confidence=0.0))
    start = DecodingOptions(acoustic_scale=0.7)

    def run(comm: Communicator) -> tuple[list[str], tuning.Tuned, str]:
        told: list[str] = []
        tuned = tune(same_everywhere, dataset, "dev", start, comm, print_line=told.append)
        result = decode_split(same_everywhere, dataset, "dev", tmp_path / "run", tuned.options, comm)
        return told, tuned, result.learnt_remark

    results = run_threads(size, run)
    first, last = results[0][0]
    assert re.fullmatch(r"tuning on dev: acoustic-scale 0.7: \d+\.\d % WER", first)
    why = "the model has learnt little, or hears no speech, so only the initial setting is tried"
    assert last == "tuning on dev: " + why
    assert size == 1 or not results[1][0]
    for _, tuned, remark in results:
        assert tuned.options == start and len(tuned.record["trials"]) == 1
        assert remark.startswith(f"{LEARNT_LITTLE}: 0.0 % of what its outputs say depends on")
    learnt = decode_split(sure, dataset, "dev", tmp_path / "run", start, SerialCommunicator())
    assert learnt.learnt_remark == ""
    # No advice to try larger values where no others were tried at all.
    largest = tune(same_everywhere, dataset, "dev", DecodingOptions(acoustic_scale=2.0), SerialCommunicator())
    assert largest.record["at_edge"] == {} and largest.summary().endswith(" there, best of 1 setting")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("spikes", [False, True])
def test_of_a_model_that_gives_blanks_alone_one_setting_is_tried(
    dataset: Dataset, tmp_path: Path, size: int, spikes: bool
) -> None:
    """As CTC begins, though much of what it says depends on what it hears; not with spikes of others."""
    sure = oracle(dataset.num_classes)
    blanks = OracleModel(dataset.num_classes, confidence=2.0)
    with torch.no_grad():
        blanks.table[: 4 if spikes else dataset.num_classes, 0] += 8.0
    model = dataclasses.replace(sure, model=blanks)
    # No loop but of one word or none, so that nothing is recognised to begin with.
    start = DecodingOptions(grammar=Grammar.WORD_LOOP, prior_scale=0.0, insertion_log_prob=-300.0)

    def run(comm: Communicator) -> tuple[list[str], tuning.Tuned, str]:
        told: list[str] = []
        tuned = tune(model, dataset, "dev", start, comm, print_line=told.append)
        remark = decode_split(model, dataset, "dev", tmp_path / "run", start, comm).learnt_remark
        return told, tuned, remark

    results = run_threads(size, run)
    for _, tuned, remark in results:
        assert (len(tuned.record["trials"]) > 1) is spikes
        assert remark.startswith(f"{LEARNT_LITTLE}: no word is recognised") is not spikes
    assert results[0][0][0] == "tuning on dev: acoustic-scale 1: 100.0 % WER"


def test_a_setting_that_takes_long_says_how_far_it_is(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "_SILENCE_S", 0.0)
    model, comm = unsure(dataset.num_classes), SerialCommunicator()
    told: list[str] = []
    tuned = tune(model, dataset, "dev", DecodingOptions(), comm, print_line=told.append)
    line = r"tuning on dev: acoustic-scale 1: 2 of 5 utterances; setting 1 of at most (\d+); trying all "
    (first,) = (found for each in told if (found := re.match(line, each)))
    assert int(first[1]) >= len(tuned.record["trials"])
    assert len(told) == (5 + 1) * len(tuned.record["trials"])
    assert told[0].endswith(" min more at this pace")


@pytest.mark.parametrize(("given", "few"), [(10_000, 2000), (500, 500)])
def test_settings_are_compared_with_few_paths_and_decoded_with_as_many_as_are_given(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, given: int, few: int
) -> None:
    widths, keep = list[int](), Recogniser.use
    searches = list[int]()

    def use(self: Recogniser, options: DecodingOptions) -> None:
        widths.append(options.max_active)
        keep(self, options)

    def search(self: Searcher, log_likelihoods: FloatArray) -> BestPath | None:
        searches.append(widths[-1])
        return keep_search(self, log_likelihoods)

    keep_search = Searcher.search
    monkeypatch.setattr(Recogniser, "use", use)
    monkeypatch.setattr(Searcher, "search", search)
    start = DecodingOptions(max_active=given)
    tuned = tune(unsure(dataset.num_classes), dataset, "dev", start, SerialCommunicator())
    assert set(searches) == {few} and len(searches) == 5 * len(tuned.record["trials"])
    assert widths[-1] == tuned.options.max_active == given
    assert tuned.record["max_active"] == few


def test_what_has_no_transcript_does_not_count(dataset: Dataset, tmp_path: Path) -> None:
    untold = write_dataset(tmp_path / "more", [*SHARDS, [Spoken("x", "", "one two", 60)]], "dev")
    start, comm = DecodingOptions(grammar=Grammar.WORD_LOOP), SerialCommunicator()
    records = [tune(unsure(one.num_classes), one, "dev", start, comm).record for one in (dataset, untold)]
    assert records[0] == records[1]


def test_the_network_runs_once(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    model = unsure(dataset.num_classes)
    tune(model, dataset, "dev", DecodingOptions(), SerialCommunicator())
    assert len(model.model.batch_shapes) == 1


def test_a_rank_that_is_asked_to_stop_stops_all(dataset: Dataset) -> None:
    def run(comm: object) -> str:
        asked = comm.rank == 1  # type: ignore[attr-defined]
        try:
            tune(unsure(dataset.num_classes), dataset, "dev", DecodingOptions(), comm, lambda: asked)  # type: ignore[arg-type]
        except Stopped:
            return "stopped"
        return "went on"

    assert run_threads(2, run) == ["stopped", "stopped"]


def test_command_tunes_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = write_dataset(tmp_path / "dev", SHARDS, "dev")
    other = write_dataset(tmp_path / "test", SHARDS, "test")
    for path in other.shard_paths("test"):
        path.rename(dataset.path / path.name)
    both = json.loads((dataset.path / "data.json").read_text())
    both["splits"] |= json.loads((other.path / "data.json").read_text())["splits"]
    (dataset.path / "data.json").write_text(json.dumps(both))

    def load_model(_run: Path, device: torch.device, **_: object) -> Oracle:
        model = unsure(dataset.num_classes)
        model.model.to(device)
        return model

    monkeypatch.setattr("speechdp.tasks.model_file.load_model", load_model)
    monkeypatch.setattr(
        tuning,
        "_VALUES",
        {"acoustic_scale": (0.5, 1.0), "prior_scale": (1.0,), "insertion_log_prob": (0.0, -3.0)},
    )
    run_dir, where = tmp_path / "run", {"backend": "serial", "device": "cpu"}
    assert DecodeCommand(run_dir, dataset.path, tune_on="dev", **where).run() == 0  # type: ignore[arg-type]
    out = capsys.readouterr().out
    values = json.loads((run_dir / "wer-test.json").read_text())
    assert out.startswith("tuned on dev: acoustic-scale ") and "; test, digit-loop" in out
    assert values["tuning"]["split"] == "dev" and len(values["tuning"]["trials"]) >= 3
    assert not (run_dir / "wer-dev.json").exists()
    DecodeCommand(run_dir, dataset.path, **where)._on_rank(SerialCommunicator())  # type: ignore[arg-type]
    again, printed = json.loads((run_dir / "wer-test.json").read_text()), capsys.readouterr()
    assert "as decode --tune-on dev chose them" in printed.err
    assert again["options"] == values["options"] and again["wer"] == values["wer"]
    search = RecognitionOptions(acoustic_scale=1.0)
    DecodeCommand(run_dir, dataset.path, search=search, **where)._on_rank(SerialCommunicator())  # type: ignore[arg-type]
    printed = capsys.readouterr()
    assert "as decode --tune-on" not in printed.err
    assert "--acoustic-scale is given, so what decode --tune-on dev chose (acoustic-scale " in printed.err
    DecodeCommand(run_dir, dataset.path, tune_on="test", **where)._on_rank(SerialCommunicator())  # type: ignore[arg-type]
    assert "the scales were chosen on this split" in capsys.readouterr().out


def test_what_cannot_be_decoded_is_refused_before_anything_is_tuned(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speechdp.tasks.model_file.load_model", lambda *_, **__: unsure(dataset.num_classes))
    monkeypatch.setattr("speechdp.decode.tuning.tune", None)
    command = DecodeCommand(
        tmp_path / "run", dataset.path, "tset", tune_on="dev", backend="serial", device="cpu"
    )
    with pytest.raises(ShardError, match="tset"):
        command._on_rank(SerialCommunicator())


def test_what_was_tuned_last_is_found_again(dataset: Dataset, tmp_path: Path) -> None:
    model, comm, run_dir = unsure(dataset.num_classes), SerialCommunicator(), tmp_path / "run"
    start = DecodingOptions(grammar=Grammar.WORD_LOOP, prior_scale=0.5)
    assert earlier_tuning(run_dir) is None
    decode_split(model, dataset, "dev", run_dir, start, comm)
    assert earlier_tuning(run_dir) is None
    tuned = tune(model, dataset, "dev", start, comm)
    decode_split(model, dataset, "dev", run_dir, tuned.options, comm, tuning=tuned.record)
    earlier = earlier_tuning(run_dir)
    assert earlier is not None and earlier.path == run_dir / "tuned.json" and earlier.split == "dev"
    assert earlier.chosen == tuned.record["chosen"]
    assert dataclasses.replace(start, **earlier.weights) == tuned.options
    assert earlier.is_for(Grammar.DIGIT_LOOP) and not earlier.is_for(Grammar.NGRAM)
    assert "chose these options for the grammar word-loop" in earlier.refusal(Grammar.NGRAM)
    # A decoding with other values does not change what was chosen.
    decode_split(model, dataset, "dev", run_dir, start, comm)
    assert earlier_tuning(run_dir) == earlier
    later = dataclasses.replace(tuned.options, acoustic_scale=0.123)
    record = {**tuned.record, "chosen": {**tuned.record["chosen"], "acoustic_scale": 0.123}}
    decode_split(model, dataset, "dev", run_dir, later, comm, tuning=record)
    earlier = earlier_tuning(run_dir)
    assert earlier is not None and earlier.weights["acoustic_scale"] == 0.123
    assert earlier.summary().startswith("acoustic-scale 0.123, ")
    (run_dir / "tuned.json").write_text('{"tuning": {}}')
    with pytest.raises(RunError, match=r"tuned\.json: cannot be read \('options' is missing\); tune again"):
        earlier_tuning(run_dir)


def write_tuned(
    run_dir: Path,
    grammar: Grammar,
    chosen: dict[str, float],
    rescore_lm: str | None,
    normalise: str = "utterance",
) -> None:
    weights = {"acoustic_scale": 0.4, "prior_scale": 1.0, "insertion_log_prob": 0.0, "lm_scale": 1.0}
    options = {**weights, "silence_probability": 0.5, "rescore_lm": rescore_lm, "normalise": normalise}
    record = {"grammar": grammar.value, "options": options, "tuning": {"split": "dev", "chosen": chosen}}
    run_dir.mkdir(exist_ok=True)
    (run_dir / "tuned.json").write_text(json.dumps(record))


def test_a_weight_that_is_given_is_not_told_as_tuned(tmp_path: Path) -> None:
    other = tmp_path / "other.arpa"
    chosen = {"acoustic_scale": 0.4, "rescore_weight": 0.7}
    write_tuned(tmp_path, Grammar.NGRAM, chosen, str(other.resolve()))
    search = RecognitionOptions(rescore_lm=other)
    weights, line, _ = search.earlier_weights(tmp_path, Grammar.NGRAM)
    assert weights["rescore_weight"] == 0.7 and "rescore-weight 0.7" in line
    search = RecognitionOptions(rescore_lm=other, rescore_weight=0.2)
    weights, line, _ = search.earlier_weights(tmp_path, Grammar.NGRAM)
    assert search.with_weights(weights).rescore_weight == 0.2 and search.with_weights(weights).acoustic_scale
    assert "rescore-weight" not in line and line.startswith("acoustic-scale 0.4, as decode --tune-on dev ")
    for share, said in ((None, "(acoustic-scale 0.4, rescore-weight 0.7)"), (0.2, "(acoustic-scale 0.4)")):
        search = RecognitionOptions(acoustic_scale=1.0, rescore_lm=other, rescore_weight=share)
        assert f" chose {said} is not used; " in search.earlier_weights(tmp_path, Grammar.NGRAM).line


def test_a_weight_that_is_given_sets_the_tuned_ones_aside_and_says_so(tmp_path: Path) -> None:
    write_tuned(tmp_path, Grammar.NGRAM, {"acoustic_scale": 0.4}, None)
    search = RecognitionOptions(lm_scale=1.0, prior_scale=0.5)
    weights, line, _ = search.earlier_weights(tmp_path, Grammar.NGRAM)
    assert weights == {} and line.startswith(
        "--prior-scale and --lm-scale are given, so what decode --tune-on dev chose (acoustic-scale 0.4) is "
    )
    # What would not have been used anyway is not missed, nor is what is damaged.
    assert search.earlier_weights(tmp_path, Grammar.WORD_LOOP) == ({}, "", None)
    (tmp_path / "tuned.json").write_text("{")
    assert search.earlier_weights(tmp_path, Grammar.NGRAM) == ({}, "", None)
    with pytest.raises(RunError, match=r"tuned\.json: cannot be read"):
        RecognitionOptions().earlier_weights(tmp_path, Grammar.NGRAM)


@pytest.mark.parametrize(
    ("tuned_with", "given", "search", "used"),
    [
        ("speaker", None, RecognitionOptions(), "speaker"),
        ("speaker", "utterance", RecognitionOptions(), "utterance"),
        ("utterance", None, RecognitionOptions(), "utterance"),
        ("speaker", None, RecognitionOptions(acoustic_scale=0.3), "utterance"),  # what was tuned is not used
    ],
)
def test_tuned_weights_are_used_with_the_normalisation_they_were_chosen_with(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    tuned_with: str,
    given: Normalise | None,
    search: RecognitionOptions,
    used: str,
) -> None:
    dataset = write_dataset(tmp_path / "data", SHARDS)
    write_tuned(tmp_path / "run", Grammar.WORD_LOOP, {"acoustic_scale": 0.4}, None, normalise=tuned_with)
    command = DecodeCommand(
        tmp_path / "run", dataset.path, grammar="word-loop", search=search, normalise=given
    )
    options = command._decoding_options(*command._with_earlier_weights(dataset, SerialCommunicator()))
    assert options.normalise == used
    said = capsys.readouterr().err
    assert ("--tune-on dev with --normalise speaker chose them" in said) == (
        tuned_with == "speaker" and not search.weights
    )


def test_options_of_decode_are_advised_to_its_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tuned(tmp_path, Grammar.NGRAM, {"acoustic_scale": 0.4}, None)
    _, line, _ = RecognitionOptions().earlier_weights(tmp_path, Grammar.WORD_LOOP)
    assert line.endswith(
        "they are not used with word-loop; set weights for it with --acoustic-scale and the like"
    )
    dataset = write_dataset(tmp_path / "data", SHARDS)
    model = unsure(dataset.num_classes)
    listener = SpeechListener(tmp_path, model, dataset, Lexicon.load(dataset.lexicon_path))
    monkeypatch.setattr(SpeechListener, "load", lambda *_: listener)
    command = SynthesizeCommand(tmp_path, recogniser=tmp_path, recogniser_data=dataset.path)
    found = command._listener(torch.device("cpu"))
    assert found is not None and found.weights == {}
    assert capsys.readouterr().err.endswith(" for the grammar ngram, so they are not used with word-loop\n")


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.EIO, "check the disk"), (errno.ESTALE, "mount"), (errno.EACCES, "make it readable")],
)
def test_a_disk_that_refuses_the_weights_is_not_advised_to_tune_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    def refuse(path: Path) -> bytes:
        raise OSError(number, os.strerror(number), str(path))

    (tmp_path / "tuned.json").write_text("{}")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(RunError, match=rf"tuned\.json: cannot be read .*{remedy}") as error:
        earlier_tuning(tmp_path)
    assert "tune again" not in str(error.value) and "\n" not in str(error.value)
