"""Read runs and sweeps from their folders.

A damaged or missing file of a run is never an error: the run is shown with the data that it has, and its
problems name the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from speechdp.decode.paired import OtherDecodingError, UtteranceErrors
from speechdp.errors import ConfigError, RunError, printable
from speechdp.files import cannot_be_read, why_no_folder
from speechdp.json_input import other_version, parse_json
from speechdp.jsonl import read_lines
from speechdp.ownership.overwrite import COMPARISON, PROFILE, SWEEP, TUNE, how_to_continue
from speechdp.ownership.owner import is_owned
from speechdp.parallel.run_files import (
    AVERAGED_EPOCHS,
    RUN_VERSION,
    SCRIPT_ENDED,
    TUNED_NAME,
    WEIGHTS,
    RunDirectory,
)
from speechdp.report.runs.periods import read_periods
from speechdp.report.runs.records import (
    RECORD_VERSION,
    check_beside,
    files_of,
    note_damaged_lines,
    number,
    read_object,
    words,
)
from speechdp.report.runs.results import (
    SCRIPT,
    TRAINER,
    Estimate,
    Evaluation,
    MeanModel,
    RunResult,
    Sweep,
    WordErrors,
)
from speechdp.report.runs.samples import read_samples
from speechdp.report.runs.script_metric import (
    has_logged,
    last_metric,
    metric_names,
    parse_metric,
    script_task,
)
from speechdp.report.runs.synthesis_measures import read_spoken
from speechdp.report.runs.timing_file import read_timing
from speechdp.tasks.metrics import Metric, TaskRecord, task_record
from speechdp.watchdog.status import StatusFolder

#: Problem of a run that was never evaluated.
METRICS_MISSING = "metrics.jsonl: missing"
#: Keys of older runs for values that have their own keys now, with a factor for conversion.
_OLDER_KEYS = {"l1_error": ("heldout_log_prob", -1.0), "attention_maximum": ("heldout_frame_accuracy", 1.0)}


def read_sweep(out: Path, metric: str = "") -> Sweep:
    """Read a sweep's folder, a folder of runs, or one run.

    Args:
        metric: metric that ranks runs of a script, in the form of parse_metric; "": that of the sweep's
            record, else the value that they log last.

    Raises:
        ConfigError: there is no run in `out`, or `metric` is invalid.
    """
    if (out / "sweep.json").is_file():
        sweep = _read_sweep_file(out / "sweep.json")
        folders = [out / name for name in sweep["runs"]]
        metric = common_metric(folders, metric, words(sweep.get("metric")), out / "sweep.json")
        split = words(sweep.get("decode_split"))
        runs = [_without_accuracy(_read_with_samples(folder, metric, split)) for folder in folders]
        runs = runs if sweep.get("completed") is True else [_with_script_end(run) for run in runs]
        failed = sweep.get("failed")
        why = {str(name): str(text) for name, text in failed.items()} if isinstance(failed, dict) else {}
        return Sweep(out, tuple(runs), why)
    if (out / "run.json").is_file():
        return Sweep(out, (_read_with_samples(out, common_metric([out], metric)),))
    if not out.is_dir():
        raise ConfigError(
            f"{out}: {why_no_folder(out)}; give that of a run, sweep, comparison, search or profile"
        )
    folders = [folder for folder in sorted(out.iterdir()) if (folder / "run.json").is_file()]
    metric = common_metric(folders, metric)
    runs = [_read_with_samples(folder, metric) for folder in folders]
    if not runs:
        raise ConfigError(
            f"{out}: neither a sweep (sweep.json), a comparison (compare.json), a search (tune.json), a "
            "profile (profile.json), a run (run.json) nor a folder of runs; give the folder of a run or the "
            "OUT of `speechdp sweep`, `speechdp compare`, `speechdp tune` or `speechdp profile`"
        )
    others = [
        folder.name
        for folder in sorted(out.iterdir())
        if any((folder / kind.record).is_file() for kind in (SWEEP, COMPARISON, PROFILE, TUNE))
    ]
    return Sweep(out, tuple(runs), others=tuple(others))


def common_metric(
    folders: Sequence[Path], metric: str = "", recorded: str = "", record: Path | None = None
) -> str:
    """Return the metric of a script's runs: `metric`, else the value that the first of them logged last.

    Args:
        recorded: replaces `metric` if that is "".
        record: the file with `recorded`.

    Raises:
        ConfigError: `metric` is invalid, runs logged only others, or no script made them.
    """
    where, metric = ("" if metric else f"{record}: ", metric or recorded)
    begun = [settings for folder in folders if (settings := _settings_in(folder))]
    if metric and begun and not any(map(_is_of_script, begun)):
        remedy = "delete it there" if where else "leave it out"
        raise ConfigError(
            f"{where}--metric: no script of yours made these runs, whose figures are given; {remedy}"
        )
    logged: dict[str, None] = {}
    for folder in folders:
        if not _is_of_script(_settings_in(folder)) or not (folder / "metrics.jsonl").is_file():
            continue
        records = _read_metrics(folder / "metrics.jsonl", [])
        if not metric and (last := last_metric(records)):
            return last
        logged.update(dict.fromkeys(name for record in records for name in metric_names(record)))
    if metric and logged and parse_metric(metric).key not in logged:
        remedy = "; give the command again with one of these, its runs are kept" if where else ""
        raise ConfigError(
            f"{where}--metric {metric}: no run logged it; they logged {', '.join(logged)}{remedy}"
        )
    return metric


def _is_of_script(settings: dict[str, Any]) -> bool:
    """Return whether a user's script made a run; early ones do not record it, but ours always name data."""
    return "script" in settings or (
        "strategy" in settings and not {"task", "options", "data"} & set(settings)
    )


def _settings_in(folder: Path) -> dict[str, Any]:
    """Return the content of run.json; its problems are reported when the run is read."""
    return _read_settings(folder, [])


def _read_settings(folder: Path, problems: list[str]) -> dict[str, Any]:
    """Return the content of run.json; empty, with a problem noted, if it cannot be read reliably."""
    settings = read_object(folder / "run.json", problems) or {}
    if what := other_version(settings, RUN_VERSION):
        problems.append(f"run.json: {what}")
        return {}
    return settings


def _read_with_samples(run_dir: Path, metric: str, split: str = "") -> RunResult:
    """Read a run with its samples, which are by far its largest files."""
    run = read_run(run_dir, metric, split)
    grows = _is_growing(run_dir)
    samples, problems = [], list(run.problems)
    for path in files_of(run_dir / "timeline", "samples-*.jsonl", problems):
        try:
            found = read_samples(path, grows=grows)
        except RunError as error:
            problems.append(f"timeline/{path.name}: {str(error).removeprefix(f'{path}: ')}")
            continue
        note_damaged_lines(f"timeline/{path.name}", found.num_damaged, problems)
        samples.append(found)
    return replace(run, samples=tuple(samples), problems=tuple(problems))


def _is_growing(run_dir: Path) -> bool:
    """Return whether a job may be writing a run, so that its files may end in parts of lines."""
    return not RunDirectory(run_dir).is_complete and is_owned(run_dir)


def _without_accuracy(run: RunResult) -> RunResult:
    # A sweep's one-rank run ends after some steps, so its speed is meaningful but its accuracy is not.
    if not (run.is_baseline and run.kind is TRAINER):
        return run
    return replace(
        run, evaluations=(), problems=tuple(text for text in run.problems if text != METRICS_MISSING)
    )


def read_run(run_dir: Path, metric: str = "", split: str = "", *, times_unfinished: bool = True) -> RunResult:
    """Read what a run has written so far; `problems` names missing or damaged files.

    Args:
        metric: metric of a script's run, in the form of parse_metric; "": the value that it logged last.
        split: split whose word errors to read; "": test, else the only one decoded.
        times_unfinished: also read the times of an unfinished run, which is slow.

    Raises:
        ConfigError: `metric` is invalid.
    """
    # A link keeps its own name, which races, sweep.json and the run on one rank refer to.
    name = printable(run_dir.resolve().name if run_dir.name in ("", "..") else run_dir.name)
    if not run_dir.is_dir():
        return RunResult(name, run_dir, {}, (), None, None, False, False, (f"{run_dir}: missing",))
    problems: list[str] = []
    grows = _is_growing(run_dir)  # before its files are read: it may end meanwhile
    settings = _read_settings(run_dir, problems)
    of_script, path = _is_of_script(settings), run_dir / "metrics.jsonl"
    # A script does not have to log anything.
    records = [] if of_script and not path.is_file() else _read_metrics(path, problems, grows=grows)
    task = script_task(metric or last_metric(records)) if of_script else task_record(settings, problems)
    evaluations = _evaluations(records, task, of_script=of_script)
    if of_script and evaluations and evaluations[-1].score is None:
        problems.append(
            f"metrics.jsonl: the last {task.metrics[0].key} is not finite, so the run has no score"
        )
    completed = RunDirectory(run_dir).is_complete
    timing = read_timing(run_dir, problems, grows=grows) if completed or times_unfinished else None
    word_errors = _find_word_errors(run_dir, split, problems)
    spoken = read_spoken(run_dir, problems)
    periods = read_periods(run_dir, problems, grows=grows)
    mean = None if of_script else _mean_model(records, task)
    ended_by = "" if completed else _read_end(run_dir, problems)
    if not completed:
        what = "has not finished; wait for the job that owner.json names" if grows else "did not finish"
        advice = f"; {'if that has ended, ' if grows else ''}continue it {how_to_continue(run_dir)}"
        problems.append(f"completed.json: missing, so the run {what}{'' if of_script else advice}")
    return RunResult(
        name, run_dir, settings, evaluations, timing, word_errors, completed, True, tuple(problems),
        spoken=spoken, script_task=task if of_script else None, periods=periods, mean=mean,
        ended_by=ended_by,
    )  # fmt: skip


def _read_end(run_dir: Path, problems: list[str]) -> str:
    """Return why the run's watchdog ended it; "": it did not."""
    try:
        return printable(StatusFolder(run_dir).read_end().removeprefix("speechdp: "))
    except OSError as error:
        problems.append(f"status/hung.txt: cannot be read ({error.strerror})")
        return ""


def _with_script_end(run: RunResult) -> RunResult:
    """Return a sweep's run, marked unfinished if its script failed after the training."""
    if not (run.kind is SCRIPT and run.completed) or RunDirectory(run.path).script_has_ended_well:
        return run
    problem = f"{SCRIPT_ENDED}: missing, so the script failed or was stopped after its training"
    return replace(run, completed=False, problems=(*run.problems, problem))


def _read_sweep_file(path: Path) -> dict[str, Any]:
    """Return the content of sweep.json; its runs must be folders beside it."""
    try:
        sweep = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(cannot_be_read(path, error)) from error
    except ValueError:
        sweep = None
    sweep = sweep if isinstance(sweep, dict) else {}
    if what := other_version(sweep, RECORD_VERSION):
        raise ConfigError(f"{path}: {what}")
    names = sweep.get("runs")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{path}: holds no list of runs; delete it and give the command of the sweep again, which writes "
            "it anew (its runs are kept)"
        )
    for name in names:
        check_beside(path, name)
    return sweep


def _read_metrics(path: Path, problems: list[str], *, grows: bool = False) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl that name a step; `grows` as for `read_lines`."""
    try:
        lines = read_lines(path, grows=grows)
    except FileNotFoundError:
        problems.append(METRICS_MISSING)
        return []
    except OSError as error:
        problems.append(f"{path.name}: cannot be read ({error.strerror})")
        return []
    note_damaged_lines(path.name, lines.num_damaged, problems)
    return [record for record in lines.records if isinstance(record.get("step"), int)]


def _evaluations(
    records: list[dict[str, Any]], task: TaskRecord, *, of_script: bool
) -> tuple[Evaluation, ...]:
    """Return the evaluations by step; for a script, the lines with its metric."""
    if of_script:
        records = [record for record in records if has_logged(record, task.metrics[0].key)]
    else:
        records = [record for record in records if not _is_of_mean(record)]
    # A resumed run repeats the evaluations after its checkpoint, so use the last one of a step.
    by_step = {record["step"]: _evaluation(record, task) for record in records}
    return tuple(by_step[step] for step in sorted(by_step))


def _is_of_mean(record: dict[str, Any]) -> bool:
    return isinstance(record.get(AVERAGED_EPOCHS), int)


def _mean_model(records: list[dict[str, Any]], task: TaskRecord) -> MeanModel | None:
    """Return the mean of the last epochs' models if it is the run's final model; else None."""
    found = [record for record in records if _is_of_mean(record)]
    return MeanModel(found[-1][AVERAGED_EPOCHS], _evaluation(found[-1], task)) if found else None


def _evaluation(record: dict[str, Any], task: TaskRecord) -> Evaluation:
    values = {metric.key: _held_out(record, metric) for metric in task.metrics}
    first = values[task.metrics[0].key]
    return Evaluation(
        step=record["step"],
        epoch=number(record, "epoch"),
        frames=number(record, "frames"),
        time_s=number(record, "time_s"),
        score=None if first is None else task.metrics[0].score(first),
        train_loss=number(record, "train_loss"),
        replica_distance=number(record, "replica_distance"),
        values=values,
    )


def _held_out(record: dict[str, Any], metric: Metric) -> float | None:
    value = number(record, metric.recorded_as)
    if value is None and metric.key in _OLDER_KEYS:
        key, factor = _OLDER_KEYS[metric.key]
        older = number(record, key)
        return None if older is None else factor * older
    return value


def _find_word_errors(run_dir: Path, split: str, problems: list[str]) -> WordErrors | None:
    """Read the errors on a split ("": test, else the only one decoded); None: there is no such file."""
    if split:
        path = run_dir / f"wer-{split}.json"
        return _read_word_errors(path, problems) if path.is_file() else None
    test = run_dir / "wer-test.json"
    found = [test] if test.is_file() else files_of(run_dir, "wer-*.json", problems)
    found = [path for path in found if "@" not in path.name]  # those are of other data than the run's
    if len(found) > 1:
        problems.append("wer-test.json: missing, and several other splits are decoded; decode the test split")
        return None
    return _read_word_errors(found[0], problems) if found else None


def _weights_text(record: Mapping[str, Any]) -> str:
    """Return the weights of the scores in a run's decoding as text; "" if not recorded."""
    known = {name: number(_options(record), name) for name in WEIGHTS}
    return ", ".join(
        f"{name.replace('_', ' ')} {value:g}" for name, value in known.items() if value is not None
    )


def _rescoring_text(record: Mapping[str, Any]) -> str:
    """Return the language model with which a decoding rescored its lists as text; "" if it did not."""
    model, weight = _options(record).get("rescore_lm"), number(_options(record), "rescore_weight")
    if not isinstance(model, str) or not model:
        return ""
    return f"rescored with {words(Path(model).name)}" + ("" if weight is None else f" at {weight:g}")


def _options(record: Mapping[str, Any]) -> dict[str, Any]:
    options = record.get("options")
    return options if isinstance(options, dict) else {}


def _chosen_on(record: Mapping[str, Any], run_dir: Path) -> str:
    """Return the split on which a decoding's weights were chosen, then or earlier; "": none."""
    tuned: Mapping[str, Any] = record
    if "tuning" not in record:  # `decode` uses the weights chosen last
        tuned = read_object(run_dir / TUNED_NAME, []) or {}
        if _weights_text(tuned) != _weights_text(record):
            return ""
    tuning = tuned.get("tuning")
    return words(tuning.get("split")) if isinstance(tuning, dict) else ""


def _read_word_errors(path: Path, problems: list[str]) -> WordErrors | None:
    record = read_object(path, problems)
    if record is None:
        return None
    wer = number(record, "wer")
    if wer is None:
        if number(record, "words") == 0:  # if words were recognised, the rate is infinite
            problem = (
                "its transcripts have no words, so that there is no word error rate; decode another --split"
            )
        else:
            problem = "no word error rate in it; decode the run again"
        problems.append(f"{path.name}: {problem}")
        return None
    counts = {key: number(record, key) for key in ("words", "insertions", "deletions", "substitutions")}
    whole = {key: None if value is None else int(value) for key, value in counts.items()}
    ser = number(record, "ser")
    return WordErrors(
        wer=wer,
        low=number(record, "wer_low"),
        high=number(record, "wer_high"),
        split=str(record.get("split", "")),
        grammar=str(record.get("grammar", "")),
        ser=None if ser is None else Estimate(ser, number(record, "ser_low"), number(record, "ser_high")),
        weights=_weights_text(record),
        chosen_on=_chosen_on(record, path.parent),
        rescoring=_rescoring_text(record),
        utterances=_read_utterance_errors(record, path, problems),
        **whole,
    )


def _read_utterance_errors(record: dict[str, Any], path: Path, problems: list[str]) -> UtteranceErrors | None:
    """Read the errors by utterance that belong to a record; None for older records, which have none."""
    try:
        return UtteranceErrors.read(path.parent, record)
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    except OtherDecodingError:
        why = f"of another decoding than {path.name}"
    except ValueError:
        why = "damaged"
    problems.append(f"{record['errors']}: {why}; decode the run again")
    return None
