"""The results of a decoding: error rates, recognised words, and their files in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from speechdp.counting import agreeing, counted
from speechdp.data.shards.dataset import MANIFEST_NAME, Dataset
from speechdp.decode.graphs.graph import Grammar
from speechdp.decode.nbest import Candidate
from speechdp.decode.paired import UtteranceErrors, errors_text
from speechdp.decode.wer import (
    WerResult,
    count_errors,
    errors_by_group,
    interval_of_new_speakers,
    oracle_of,
    word_error_rate,
)
from speechdp.errors import RunError
from speechdp.files import cannot_be_written, or_by_links, remove_left_over, write_text_atomically
from speechdp.json_input import parse_json
from speechdp.parallel.run_files import TRAINED_ON, TUNED_NAME


@dataclass(frozen=True)
class Hypothesis:
    """One recognised utterance.

    Attributes:
        utterance_id: name of the utterance.
        speaker: its speaker; "" if the data have none.
        ref: the reference words.
        num_candidates: number of word sequences found; 0: no path survived.
        hyp: the best word sequence.
        oracle: the word sequence with the fewest errors; "" without reference words.
    """

    utterance_id: str
    speaker: str
    ref: str
    num_candidates: int
    hyp: str
    oracle: str

    @classmethod
    def of(cls, utterance_id: str, speaker: str, ref: str, candidates: Sequence[Candidate]) -> Hypothesis:
        """Keep only what is needed of the word sequences found, of which there may be hundreds.

        Args:
            utterance_id, speaker, ref: as the attributes.
            candidates: best first; empty if no path survived.
        """
        texts = [" ".join(candidate.words) for candidate in candidates]
        oracle = oracle_of(ref, texts) if ref else ""
        return cls(utterance_id, speaker, ref, len(texts), texts[0] if texts else "", oracle)


@dataclass(frozen=True)
class DecodingResult:
    """A decoded split.

    Attributes:
        split: name of the split.
        name: base name of its files, from `results_name`.
        data: path and checksum of the data.
        grammar: the grammar used.
        wer: word errors.
        speakers: word errors of each speaker, worst first; empty if the data have no speakers.
        retried: utterances that needed a wider beam.
        failed: utterances without any hypothesis: counted as deletions.
        unknown_words: reference words that cannot be recognised; each is an error.
        hypotheses: the file of hypotheses.
        utterances: recognised utterances, by utterance id.
        settings: what was searched (`graph`), how (`options`), and how that was chosen (`tuning`).
        nbest: the lists of the most probable word sequences, if they were requested.
        speed: time and memory used.
        rescoring_remark: message about the language model used for rescoring; "": none.
        learnt_remark: message about a model that has learnt little; "": none.
        are_speakers_new: False if the model was trained on some of them, or if that is unknown for its own
            data.
    """

    split: str
    name: str
    data: Mapping[str, str]
    grammar: Grammar
    wer: WerResult
    speakers: Mapping[str, WerResult]
    retried: int
    failed: int
    unknown_words: int
    hypotheses: Path
    utterances: tuple[Hypothesis, ...]
    settings: Mapping[str, Any]
    nbest: NBestLists | None = None
    speed: DecodingSpeed | None = None
    rescoring_remark: str = ""
    learnt_remark: str = ""
    are_speakers_new: bool = True

    @property
    def untranscribed(self) -> int:
        """Number of utterances without a transcript: recognised, but not counted in error rates."""
        return len(self.utterances) - self.wer.utterances

    @property
    def of_new_speakers(self) -> tuple[float, float] | None:
        """The WER's interval for speakers like these, as fractions; None if too little is known.

        That is the case if the model was trained on some of them, if some words have no speaker, or if
        `interval_of_new_speakers` returns None.
        """
        if (
            not self.are_speakers_new
            or sum(errors.words for errors in self.speakers.values()) < self.wer.words
        ):
            return None
        return interval_of_new_speakers(self.speakers.values())

    @property
    def speakers_remark(self) -> str:
        """Message about the chance in the choice of speakers; "": unknown."""
        if self.of_new_speakers is None:
            return ""
        low, high = (f"{100 * rate:.1f}" for rate in self.of_new_speakers)
        return (
            f"for other speakers, if they differ as these {len(self.speakers)} do: WER {low} to {high} % "
            "(95 % interval)"
        )

    @property
    def unknown_remark(self) -> str:
        """Message about reference words that cannot be recognised; "": there are none."""
        if not self.unknown_words:
            return ""
        share = 100 * self.unknown_words / self.wer.words
        are_not = agreeing(self.unknown_words, "are not in the vocabulary")
        return f"{counted(self.unknown_words, 'word')} ({share:.1f} %) {are_not}: counted as errors"


@dataclass(frozen=True)
class DecodingSpeed:
    """Time and memory that decoding used, over all ranks.

    Attributes:
        speech_s: seconds of speech.
        graph_s: CPU seconds of one rank until the graph was ready.
        network_s: CPU seconds of all ranks and their threads for reading and scoring.
        search_s: CPU seconds of all ranks for the search, and for rescoring.
        peak_bytes: largest memory of any rank.
    """

    speech_s: float
    graph_s: float
    network_s: float
    search_s: float
    peak_bytes: int

    @classmethod
    def over(cls, parts: Sequence[Mapping[str, float]]) -> DecodingSpeed:
        """Combine the values of all ranks, each given as `vars` of its own object."""
        speech, network, search = (
            sum(part[name] for part in parts) for name in ("speech_s", "network_s", "search_s")
        )
        graph, peak = (max(part[name] for part in parts) for name in ("graph_s", "peak_bytes"))
        return cls(speech, graph, network, search, int(peak))

    def summary(self) -> str:
        """Return a summary of one line."""
        network, search = (
            seconds / self.speech_s if self.speech_s else 0.0 for seconds in (self.network_s, self.search_s)
        )
        return (
            f"real-time factor {network + search:.3f} a core (network {network:.3f}, search {search:.3f}), "
            f"{self.speech_s:,.1f} s of speech; graph in {self.graph_s:.1f} s; peak memory "
            f"{self.peak_bytes / 2**20:,.0f} MiB a rank"
        )


@dataclass(frozen=True)
class NBestLists:
    """The most probable word sequences of a split.

    Attributes:
        path: the file of all lists.
        size: the longest that a list may be.
        mean: mean number of sequences per list.
        oracle: word errors if the best sequence of each list is chosen, knowing the reference.
    """

    path: Path
    size: int
    mean: float
    oracle: WerResult

    @classmethod
    def of(cls, hypotheses: Sequence[Hypothesis], path: Path, size: int) -> NBestLists | None:
        """Evaluate the lists of a split.

        Args:
            hypotheses: all utterances of the split.
            path: the file that will hold the lists.
            size: the longest that a list may be; 0: no lists were requested.

        Returns:
            None if no lists were requested.
        """
        if size == 0:
            return None
        transcribed = judged(hypotheses)
        mean = sum(h.num_candidates for h in hypotheses) / max(len(hypotheses), 1)
        return cls(
            path, size, mean, word_error_rate([h.ref for h in transcribed], [h.oracle for h in transcribed])
        )

    def summary(self) -> str:
        """Return one line on how good the lists are."""
        return (
            f"{self.size}-best lists ({self.mean:.1f} sequences on average): oracle WER "
            f"{100 * self.oracle.wer:.2f} %, {self.path}"
        )


def judged(hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Return the utterances with a transcript, which are those that errors are counted on."""
    return [h for h in hypotheses if h.ref]


def errors_by_speaker(hypotheses: Sequence[Hypothesis]) -> Mapping[str, WerResult]:
    """Count the errors of each speaker named in the data, worst first."""
    known = [h for h in hypotheses if h.speaker]
    return errors_by_group([h.speaker for h in known], [h.ref for h in known], [h.hyp for h in known])


def nbest_path(hypotheses: Path) -> Path:
    """Return the file of the n-best lists beside that of the hypotheses."""
    return hypotheses.with_suffix(".nbest")


def errors_path(hypotheses: Path) -> Path:
    """Return the file of the errors by utterance beside that of the hypotheses."""
    return hypotheses.with_suffix(".errors")


def wer_path(run_dir: Path, name: str) -> Path:
    """Return the file with a decoding's word errors; each has its own, so that none overwrites another."""
    return run_dir / f"wer-{name}.json"


def has_word_errors(run_dir: Path, split: str) -> bool:
    """Return whether a split of the run's own data has been decoded; a damaged record does not count.

    Neither does a record whose errors by utterance are missing or damaged, unless it is of an older decoding,
    which has none.
    """
    try:
        record = parse_json(wer_path(run_dir, split).read_text(encoding="utf-8"))
        UtteranceErrors.read(run_dir, record)
        return isinstance(record["wer"], int | float)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def results_name(run_dir: Path, split: str, dataset: Dataset, trained_on: object) -> str:
    """Return the base name of a decoding's files: SPLIT, or SPLIT@FOLDER for other data than the run's.

    If other data from a folder of the same name use that name already, part of the checksum is appended.

    Data that the run was not trained on get the plain name if the run's own data have no such split and
    nothing else uses it: for example a test set that was prepared separately.

    Args:
        run_dir: the run.
        split: a split of `dataset`.
        dataset: the data to decode.
        trained_on: checksum of the data that the model was trained on; None: unknown.
    """
    if trained_on is None or dataset.checksum == trained_on:
        return split
    name = f"{split}@{dataset.path.resolve().name}"
    names = [name, f"{name}-{dataset.checksum[:8]}"]
    if split not in _object_in(run_dir / TRAINED_ON / MANIFEST_NAME, "splits"):
        names.insert(0, split)
    return next((name for name in names if _is_free(wer_path(run_dir, name), dataset.checksum)), names[-1])


def _is_free(record: Path, checksum: str) -> bool:
    """Return whether a decoding's record may be replaced by that of data with this checksum."""
    return bool(_object_in(record, "data").get("checksum", checksum) == checksum)


def _object_in(path: Path, key: str) -> dict[str, Any]:
    """Return an object from a JSON file; empty if there is none."""
    try:
        values = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    found = values.get(key) if isinstance(values, dict) else None
    return found if isinstance(found, dict) else {}


def _record_of(run_dir: Path, result: DecodingResult) -> dict[str, Any]:
    """Return the contents of RUN/wer-<name>.json (docs/run-directory.md); its paths are relative to RUN."""
    nbest = result.nbest
    record = {
        "split": result.split,
        "data": dict(result.data),
        "grammar": result.grammar.value,
        **asdict(result.wer),
        "wer_of_new_speakers": result.of_new_speakers,
        "unknown_words": result.unknown_words,
        "retried": result.retried,
        "failed": result.failed,
        "untranscribed": result.untranscribed,
        "hypotheses": str(result.hypotheses.relative_to(run_dir)),
        "errors": str(errors_path(result.hypotheses).relative_to(run_dir)),
        **result.settings,
        "speakers": [{"speaker": name, **asdict(errors)} for name, errors in result.speakers.items()],
    }
    if nbest is not None:
        record["nbest"] = {
            "size": nbest.size,
            "mean": nbest.mean,
            "oracle_wer": nbest.oracle.wer,
            "path": str(nbest.path.relative_to(run_dir)),
        }
    return record


def write_results(run_dir: Path, result: DecodingResult, lists: Mapping[str, str]) -> None:
    """Write all files of a decoding to the run's folder.

    Args:
        run_dir: the run.
        result: the results.
        lists: `nbest_lines` of each utterance, by its id, if lists were requested.

    Raises:
        RunError: a disk error.
    """
    nbest, record = result.nbest, _record_of(run_dir, result)
    lines = (f"{h.utterance_id} {h.hyp}".rstrip() + "\n" for h in result.utterances)
    transcribed = judged(result.utterances)
    errors = errors_text(
        [h.utterance_id for h in transcribed],
        count_errors([h.ref for h in transcribed], [h.hyp for h in transcribed]),
    )
    earlier = nbest_path(result.hypotheses)
    with results_at(run_dir):
        if nbest is None and earlier.exists():
            earlier.unlink()  # belongs to another decoding
        if nbest is not None:
            write_text_atomically(nbest.path, "".join(lists[h.utterance_id] for h in result.utterances))
        write_text_atomically(result.hypotheses, "".join(lines))
        write_text_atomically(errors_path(result.hypotheses), errors)
        write_text_atomically(wer_path(run_dir, result.name), json.dumps(record, indent=2) + "\n")
        if "tuning" in result.settings:  # separate file: a later decoding of this split may use other values
            tuned = {name: record[name] for name in ("grammar", "options", "tuning")}
            write_text_atomically(run_dir / TUNED_NAME, json.dumps(tuned, indent=2) + "\n")
    for written in (result.hypotheses, wer_path(run_dir, result.name)):
        remove_left_over(written)


@contextmanager
def results_at(run_dir: Path) -> Iterator[None]:
    """Convert disk errors in the block, which writes results of the run, to messages.

    Raises:
        RunError: replaces an OSError raised in the block.
    """
    try:
        yield
    except OSError as error:
        elsewhere = or_by_links(error, run_dir, "hypotheses", "report")
        raise RunError(cannot_be_written(error.filename or run_dir, error) + elsewhere) from error
