"""Train once for each averaging period, on the same data from the same seed, decode each, report."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speechdp.comm.serial import SerialCommunicator
from speechdp.decode.recognise import DecodingOptions, decode_split, wer_path
from speechdp.errors import ConfigError, RunError
from speechdp.experiments.compare.record import refuse_others
from speechdp.files import cannot_be_written, write_text_atomically
from speechdp.labels.kaldi_pdfs import refuse_kaldi_pdfs
from speechdp.options.run import TrainOptions
from speechdp.parallel.period import Period, PeriodUnit
from speechdp.parallel.registry import StrategyChoice, strategy_class, strategy_names
from speechdp.process.ending import Stopped
from speechdp.tasks.model_file import load_model
from speechdp.train.ownership import owned
from speechdp.train.progress import Reporter
from speechdp.train.realign import make_alignments, train_or_go_on, with_alignments
from speechdp.train.session import Session

SWEEP_FORMAT = "speechdp-sweep"
SWEEP_VERSION = 1
#: Name of the run that measures the throughput of one rank; the report compares with it.
ONE_RANK = "one-rank"
#: Options that hold a strategy's period.
_PERIOD_OPTIONS = ("period", "every")


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep trains.

    Attributes:
        strategy: the strategy whose period is swept, with its other options.
        periods: the periods, e.g. ("1", "4", "16", "64").
        reference: strategies trained beside them.
        one_rank_steps: steps of the throughput baseline on one rank; 0: none.
        decode_split: split whose WER is reported; "" for none.
        others: names may be unknown here: a script can register strategies of its own, whose period is
            taken to be their option `period`.
    """

    strategy: str
    periods: tuple[str, ...]
    reference: tuple[str, ...] = ("gradient_averaging",)
    one_rank_steps: int = 200
    decode_split: str = "test"
    others: bool = False

    def runs(self) -> dict[str, StrategyChoice]:
        """Return the folder's name of each run and its strategy.

        Raises:
            ConfigError: no period, one given twice, or a strategy without a period.
        """
        name, _, rest = self.strategy.partition(":")
        option, kind = (_PERIOD_OPTIONS[0], Period) if self._is_other(name) else _period_option(name)
        if not self.periods:
            raise ConfigError("--periods: give at least one, e.g. --periods 1,4,16,64")
        if len(set(self.periods)) < len(self.periods):
            raise ConfigError(f"--periods {','.join(self.periods)}: a period is given twice")
        result = {text.replace(":", "-"): StrategyChoice(text) for text in self.reference}
        for text in self.periods:
            period = Period.parse(text)
            if kind is int and period.unit is not PeriodUnit.STEPS:
                raise ConfigError(f"--periods {text}: {name} counts its period in steps")
            options = ",".join(filter(None, [f"{option}={period}", rest]))
            result[f"{name}-{period}"] = StrategyChoice(f"{name}:{options}")
        for choice in result.values():
            if not self._is_other(choice.text):
                _ = choice.parsed  # raises what is wrong with it
        return result

    def _is_other(self, strategy: str) -> bool:
        return self.others and strategy.partition(":")[0] not in strategy_names()


def _period_option(name: str) -> tuple[str, Any]:
    """Return the option of a strategy that holds its period, and the option's type.

    Raises:
        ConfigError: it has none.
    """
    kinds = typing.get_type_hints(strategy_class(name))
    for option in _PERIOD_OPTIONS:
        if option in kinds:
            return option, kinds[option]
    raise ConfigError(f"--swept {name}: has no period; choose another strategy, e.g. model_averaging")


def run_sweep(
    session: Session,
    options: TrainOptions,
    plan: SweepPlan,
    out_dir: Path,
    reporter_for: Callable[[str], Reporter],
) -> None:
    """Train, decode and record every run of a sweep.  Collective.

    Finished runs are kept, interrupted ones go on, so the same command can be given again.

    Args:
        reporter_for: makes the reporter of a run from its name.

    Raises:
        as `train_run`; ConfigError where `out_dir` holds a sweep with other options.
    """
    runs = plan.runs()
    with_baseline = session.comm.size > 1 and plan.one_rank_steps > 0
    names = [*([ONE_RANK] if with_baseline else []), *runs]
    if plan.decode_split:
        refuse_kaldi_pdfs(session.dataset.classes_path, '--decode-split ("" for none)')
    if session.comm.rank == 0:
        write_sweep(out_dir, names, completed=False)
    session.comm.barrier()
    alignments = make_alignments(
        dataclasses.replace(session, reporter=reporter_for("alignment")), options, out_dir
    )
    options = with_alignments(options, alignments)
    for position, name in enumerate(names, start=1):
        run_session = dataclasses.replace(session, reporter=reporter_for(f"[{position}/{len(names)}] {name}"))
        with owned(run_session, out_dir / name, "sweep"):
            if name == ONE_RANK:
                _train_one_rank(run_session, options, plan, out_dir / name)
                continue
            own = dataclasses.replace(options, strategy=runs[name])
            train_or_go_on(run_session, own, out_dir / name)
            if plan.decode_split:
                _decode(run_session, plan.decode_split, out_dir / name)
    if session.comm.rank == 0:
        write_sweep(out_dir, names, completed=True)
    session.comm.barrier()


def _train_one_rank(session: Session, options: TrainOptions, plan: SweepPlan, run_dir: Path) -> None:
    """Time rank 0 by itself while the others sleep in the exchange after it."""
    stopped = False
    if session.comm.rank == 0:
        session.reporter.notice(f"one rank alone for {plan.one_rank_steps} steps, to compare the speed with")
        facts = {**session.facts, "hosts": session.facts.get("hosts", [])[:1]}
        alone = dataclasses.replace(session, comm=SerialCommunicator(), facts=facts)
        # Resolved for all ranks, so that this one has the batch of one of them, not that of all together.
        own = dataclasses.replace(
            options.resolve(session.comm.size),
            strategy=StrategyChoice("gradient_averaging"),
            max_steps=plan.one_rank_steps,
        )
        try:
            train_or_go_on(alone, own, run_dir)
        except Stopped:
            stopped = True
    if session.comm.broadcast_object(stopped):  # the others have not trained, but must leave as well
        raise Stopped


def _decode(session: Session, split: str, run_dir: Path) -> None:
    """Decode a split once; a result that stands there is kept.  Raises Stopped, having kept nothing."""
    if session.comm.broadcast_object(wer_path(run_dir, split).is_file()):
        return
    trained = load_model(run_dir, session.device)
    result = decode_split(
        trained, session.dataset, split, run_dir, DecodingOptions(), session.comm, session.is_asked_to_stop
    )
    session.reporter.notice(f"{run_dir.name}: {result.wer.summary()} on {split}")


def write_sweep(
    out_dir: Path,
    names: list[str],
    *,
    completed: bool,
    settings: dict[str, Any] | None = None,
    metric: str = "",
) -> None:
    """Write OUT/sweep.json.

    Args:
        names: of the runs' folders.
        settings: what runs of a script share; None: each run of ours checks its own.
        metric: what runs of a script are judged by; "": what they log last.

    Raises:
        ConfigError: the folder holds a sweep over other runs, or one with other settings.
        RunError: it cannot be read or written.
    """
    path = out_dir / "sweep.json"
    head: dict[str, Any] = {
        "format": SWEEP_FORMAT,
        "version": SWEEP_VERSION,
        "runs": names,
        "completed": completed,
    }
    if settings:
        head["settings"] = settings
    if metric:
        head["metric"] = metric
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            before = json.loads(path.read_text(encoding="utf-8"))
            if before["runs"] != names:
                raise ConfigError(
                    f"{path}: holds a sweep over other runs; choose another folder, or --overwrite"
                )
            refuse_others(path, dict(before.get("settings", {})), settings or {})
        write_text_atomically(path, json.dumps(head, indent=2) + "\n")
    except OSError as error:
        raise RunError(cannot_be_written(path, error)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path}: damaged ({error}); choose another folder, or --overwrite") from error
