"""examples/own_network: an acoustic model of one's own aligns, is decoded and transcribes as ours does."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from speechdp.cli.main import run as speechdp
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ConfigError, RunError
from speechdp.labels.transcript_hmm import num_ctc_classes
from speechdp.tasks.acoustic import AcousticTask, CtcTask, FullSumTask
from speechdp.tasks.model_file import load_model
from speechdp.tasks.registry import TASKS, networks_of, task
from speechdp.testing import task_contract
from speechdp.trained import AcousticModel
from tests.helpers.corpora import TrainedOnFsdd, trained_on_fsdd
from tests.helpers.mpi import REPOSITORY

CPU = torch.device("cpu")
TASK = "tdnn:Tdnn"
SIZES = "width=32,inner=12,layers=3,bottleneck=24,dropout=0.1"
STEPS = ("--batch-size", "4", "--learning-rate", "0.01")
BRIEFLY = ("--backend", "serial", *STEPS)


@pytest.fixture(scope="module", autouse=True)
def _found_by_python() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TASKS, "registered", {})
        patch.delitem(sys.modules, "tdnn", raising=False)
        patch.syspath_prepend(REPOSITORY / "examples" / "own_network")
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedOnFsdd:
    alignment = ("--realign", "1", "--realign-epochs", "4", "--context", "left")
    own = ("--task", f"{TASK}:{SIZES}", "--epochs", "16")
    return trained_on_fsdd(tmp_path_factory.mktemp("own_network"), *own, *alignment, *STEPS)


def word_errors(run: Path, split: str) -> float:
    return float(json.loads((run / f"wer-{split}.json").read_text())["wer"])


def test_it_keeps_what_training_relies_on() -> None:
    task_contract(f"{TASK}:{SIZES},stride=2")


def test_digits_are_recognised_in_data_and_in_files(
    trained: TrainedOnFsdd, capsys: pytest.CaptureFixture[str]
) -> None:
    decode = ["decode", str(trained.run), str(trained.data), "--backend", "serial", "--task", TASK]
    assert speechdp([*decode, "--tune-on", "dev"]) == 0
    assert word_errors(trained.run, "test") <= 0.2
    capsys.readouterr()
    files = [str(path) for path in trained.recordings]
    assert speechdp(["transcribe", str(trained.run), *files, "--task", TASK]) == 0
    heard = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    digits = ("zero", "one", "two", "three", "four")
    right = sum(heard.get(path.stem) == digits[int(path.stem[0])] for path in trained.recordings)
    assert right >= 0.8 * len(trained.recordings)
    model = AcousticModel(trained.run, task=TASK)
    assert {
        path.stem: model.transcribe(path).text for path in trained.recordings if path.stem in heard
    } == heard


def test_another_training_begins_from_it_and_its_scores_are_kaldis(
    trained: TrainedOnFsdd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tdnn  # noqa: PLC0415

    monkeypatch.setattr(TASKS, "registered", {})
    later, tied = tmp_path / "later", trained.run / "alignments" / "tied"
    begin = ["--initial-model", str(trained.run), "--alignments", str(tied), "--epochs", "1"]
    own = ["--task", f"own_criterion:{SIZES}"]  # as of MMI, which goes on from cross-entropy
    task("own_criterion")(dataclasses.make_dataclass("OwnCriterion", [], bases=(tdnn.Tdnn,), frozen=True))
    assert speechdp(["train", str(trained.data), str(later), *own, *begin, *BRIEFLY]) == 0
    first = json.loads((later / "metrics.jsonl").read_text().splitlines()[0])
    last = json.loads((trained.run / "metrics.jsonl").read_text().splitlines()[0])
    assert first["heldout_log_prob"] > last["heldout_log_prob"]  # after an epoch each
    archive = tmp_path / "scores.ark"
    written = ["posteriors", str(trained.run), str(trained.data), "-o", str(archive), "--task", TASK]
    assert speechdp(written) == 0 and archive.stat().st_size > 0


def test_a_sweep_decodes_its_runs(trained: TrainedOnFsdd, tmp_path: Path) -> None:
    out, tied = tmp_path / "sweep", trained.run / "alignments" / "tied"
    own = ["--task", f"{TASK}:{SIZES}", "--alignments", str(tied), "--epochs", "1", "--periods", "1,4"]
    assert speechdp(["sweep", str(trained.data), str(out), *own, "--race", "0", *BRIEFLY]) == 0
    assert len(list(out.glob("*/wer-*.json"))) >= 2


def test_the_file_alone_imports_nothing(
    trained: TrainedOnFsdd, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "tdnn")
    assert speechdp(["decode", str(trained.run), str(trained.data), "--backend", "serial"]) != 0
    said = capsys.readouterr().err
    assert "its network belongs to a task of your own, tdnn:Tdnn; give the --task of the training" in said
    assert "Traceback" not in said and "tdnn" not in sys.modules
    with pytest.raises(RunError, match="of your own, tdnn:Tdnn; give the --task"):
        load_model(trained.run, CPU, own=networks_of("acoustic"))


def test_other_options_than_it_was_made_with_are_refused(trained: TrainedOnFsdd) -> None:
    load_model(trained.run, CPU, own=networks_of(f"{TASK}:{SIZES}"))
    with pytest.raises(
        RunError, match="made with width=32, but --task gives another value; give --task without options"
    ):
        load_model(trained.run, CPU, own=networks_of(f"{TASK}:inner=12,width=64"))


def test_a_class_that_was_changed_since_is_refused(
    trained: TrainedOnFsdd, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tdnn  # noqa: PLC0415

    made = tdnn.TdnnNetwork

    def changed(feature_dim: int, num_classes: int, sizes: object) -> torch.nn.Module:
        network = made(feature_dim, num_classes, sizes)
        network.input = torch.nn.Linear(5, 7)
        return network

    monkeypatch.setattr(tdnn, "TdnnNetwork", changed)
    wrong = r"now makes another network: input.bias has shape \(7,\) in it, but \(32,\) in the file"
    with pytest.raises(RunError, match=wrong):
        load_model(trained.run, CPU, own=networks_of(TASK))
    monkeypatch.setattr(tdnn, "TdnnNetwork", lambda *_: 1 / 0)
    with pytest.raises(ConfigError, match=r"make_network\(\): .*tdnn.*: ZeroDivisionError.*; fix the class"):
        load_model(trained.run, CPU, own=networks_of(TASK))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"options": None}, "damaged"),
        ({"feature_dim": None}, "damaged"),
        ({"feature_dim": "x"}, "damaged"),
        ({"num_classes": -1}, "damaged"),
        ({"num_classes": 1 << 40}, "damaged"),
        ({"options": "nonsense=3"}, "has no option 'nonsense'"),
        ({"options": "nonsense=3"}, "is from another version of the class, or was edited by hand; give the"),
        ({"options": "width=100000,inner=100000,layers=100"}, "now makes another network"),  # of 8 TB
    ],
)
def test_a_damaged_file_is_told_by_its_name_before_memory_is_taken(
    trained: TrainedOnFsdd, tmp_path: Path, change: dict[str, object], said: str
) -> None:
    source = trained.run / "model.safetensors"
    with safetensors.safe_open(str(source), framework="pt") as file:
        head = json.loads(file.metadata()["speechdp"])
    head = {key: value for key, value in (head | change).items() if value is not None}
    tensors = safetensors.torch.load_file(source)
    safetensors.torch.save_file(tensors, tmp_path / source.name, {"speechdp": json.dumps(head)})
    with pytest.raises(RunError, match=re.escape(said)) as raised:
        load_model(tmp_path, CPU, own=networks_of(TASK))
    assert str(raised.value).startswith(f"{tmp_path / source.name}: ")


def test_options_that_the_class_refuses_are_told_in_a_line(
    trained: TrainedOnFsdd, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import tdnn  # noqa: PLC0415

    def refuse(self: object) -> None:
        raise KeyError(tdnn.Tdnn.width + 1)

    namespace = {"__post_init__": refuse, "name": TASK}
    refusing = dataclasses.make_dataclass("Tdnn", [], bases=(tdnn.Tdnn,), frozen=True, namespace=namespace)
    monkeypatch.setattr(tdnn, "Tdnn", refusing)
    with pytest.raises(RunError, match=r"model\.safetensors: .*KeyError: 257; the file is from another ver"):
        load_model(trained.run, CPU, own=networks_of(TASK))
    run = ["train", str(trained.data), str(trained.run / "no"), "--task", TASK, *BRIEFLY]
    assert speechdp(run) != 0
    said = capsys.readouterr().err
    assert "KeyError: 257; give other options, or fix the class" in said and "Traceback" not in said


def test_a_class_may_have_a_name_of_its_own(
    trained: TrainedOnFsdd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tdnn  # noqa: PLC0415

    named = dataclasses.make_dataclass(
        "Named", [], bases=(tdnn.Tdnn,), frozen=True, namespace={"name": "conv"}
    )
    monkeypatch.setattr(tdnn, "Named", named, raising=False)
    run, own = tmp_path / "run", f"tdnn:Named:{SIZES}"
    learn = ["--task", own, "--epochs", "1", "--flat-start", "--realign", "1", "--realign-epochs", "1"]
    assert speechdp(["train", str(trained.data), str(run), *learn, *BRIEFLY]) == 0
    assert isinstance(load_model(run, CPU, own=networks_of("tdnn:Named")).model, tdnn.TdnnNetwork)


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (lambda self, feature_dim, num_classes: None, "it returned an object of type NoneType"),
        (lambda self, feature_dim: torch.nn.Linear(1, 1), "make_network(): "),
    ],
)
def test_what_is_no_network_is_told(
    trained: TrainedOnFsdd,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    network: object,
    said: str,
) -> None:
    import tdnn  # noqa: PLC0415

    monkeypatch.setattr(tdnn.Tdnn, "make_network", network)
    run = ["train", str(trained.data), str(tmp_path / "run"), "--task", TASK, "--epochs", "1", *BRIEFLY]
    assert speechdp(run) != 0
    told = capsys.readouterr().err
    assert said in told and "Traceback" not in told


def test_another_network_than_that_of_the_initial_model_is_told_with_its_options(
    trained: TrainedOnFsdd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tied = str(trained.run / "alignments" / "tied")
    begin = ["--initial-model", str(trained.run), "--alignments", tied, "--task", f"{TASK}:width=20"]
    assert speechdp(["train", str(trained.data), str(tmp_path / "run"), *begin, *BRIEFLY]) != 0
    assert "give the options of that run (--task tdnn:Tdnn:width=32," in capsys.readouterr().err


def test_it_is_read_as_it_was_written(trained: TrainedOnFsdd) -> None:
    loaded = load_model(trained.run, CPU, own=networks_of(TASK))
    assert loaded.config["options"] == f"{SIZES.replace('layers=3', 'layers=3,stride=3')}"
    dataset = Dataset.open(trained.data)
    features = torch.randn(2, 7, dataset.feature_dim)
    logits = loaded.model(features, torch.tensor([7, 4]))
    alone = loaded.model(features[1:, :4], torch.tensor([4]))
    torch.testing.assert_close(logits[1:, :4], alone)
    assert logits.shape == (2, 7, loaded.config["num_classes"])
    assert loaded.tying is not None and len(loaded.class_log_prior) == loaded.tying.num_classes


@pytest.mark.parametrize("criterion", [CtcTask, FullSumTask])
def test_whole_transcripts_are_learnt_by_the_same_network(
    trained: TrainedOnFsdd, tmp_path: Path, criterion: type[AcousticTask]
) -> None:
    import tdnn  # noqa: PLC0415

    cls = dataclasses.make_dataclass("OwnCriterion", [], bases=(tdnn.Tdnn, criterion), frozen=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TASKS, "registered", {})
        task("own_criterion")(cls)
        run = tmp_path / "run"
        learn = ["--task", f"own_criterion:{SIZES}", "--epochs", "1", *BRIEFLY]
        assert speechdp(["train", str(trained.data), str(run), *learn]) == 0
        decode = ["decode", str(run), str(trained.data), "--backend", "serial", "--task", "own_criterion"]
        assert speechdp(decode) == 0
        loaded = load_model(run, CPU, ctc=True, own=networks_of("own_criterion"))
    assert isinstance(loaded.model, tdnn.TdnnNetwork) and word_errors(run, "test") >= 0
    num_states = Dataset.open(trained.data).num_classes
    expected = num_states if criterion is FullSumTask else num_ctc_classes(num_states)
    assert loaded.config["num_classes"] == expected


def test_the_network_of_the_documentation_learns_decodes_and_is_timed(
    trained: TrainedOnFsdd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (REPOSITORY / "docs" / "api.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (example,) = (example for example in examples if "make_network" in example)
    (tmp_path / "own_network_of_docs.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    own, data, run = "own_network_of_docs:Convolutional:width=48", str(trained.data), str(tmp_path / "run")
    task_contract(own)
    learn = ["--task", own, "--flat-start", "--epochs", "12"]
    assert speechdp(["train", data, run, *learn, *BRIEFLY]) == 0
    assert speechdp(["decode", run, data, "--backend", "serial", "--task", own]) == 0
    assert word_errors(Path(run), "test") <= 0.2
    # It has no parts: all of it is the encoder.
    profile = ["profile", data, str(tmp_path / "profile"), "--ranks", "1", "--steps", "4", "--warmup", "1"]
    kinds = ["--only", "weak,encoder,output", "--task", own, "--batch-size", "4"]
    assert speechdp([*profile, *kinds]) == 0
