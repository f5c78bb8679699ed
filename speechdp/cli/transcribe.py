"""`speechdp transcribe`: recognise audio files with a trained model."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from speechdp import exit_codes
from speechdp.counting import counted
from speechdp.data.signal.channel import Channel
from speechdp.errors import ConfigError, SeveralChannelsError, UsageError
from speechdp.options.channel import CHANNEL_OR_EACH_TEXT
from speechdp.options.recognition import WITHOUT_EFFECT_ON_CTC, RecognitionOptions
from speechdp.options.shown import heading, shown
from speechdp.process.notices import print_message, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from speechdp.data.shards.dataset import Dataset
    from speechdp.data.signal.audio import AudioSource
    from speechdp.decode.recogniser import DecodingOptions
    from speechdp.decode.transcribe import Recording, Transcription

#: Maximum number of recordings without a result to name; the last line gives their total.
_MOST_NAMED = 5
#: Remedy if a file has several channels and --channel is not given.
_CHANNELS = (
    "add --channel each for a transcript of every channel, --channel 1 for the first, or --channel mix"
)
#: Name that stands for standard output instead of a file.
_STANDARD_OUTPUT = Path("-")


@dataclass(frozen=True)
class TranscribeCommand:
    """Recognise the speech in audio files with a trained model.

    One line a file, its name and its words: speechdp transcribe RUN talk.wav interviews/

    The words are those of the lexicon that the model was trained with; if its training data have a language
    model (prepare --lm-order), that is used."""

    run_dir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Run directory written by `speechdp train`."""
    files: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="FILE|FOLDER ...", help_behavior_hint="(required)"),
    ]
    """Audio files, or folders of them; any sampling rate and length."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"]), shown("FILE", "standard output")] = None
    """Text file to write: a line for each recording, its name and its words; -: standard output."""
    ctm: Annotated[Path | None, shown("FILE", "none")] = None
    """Also write the time of every word and the model's confidence in it, 0 to 1 (a CTM file).
    -: to standard output, in place of the words if there is no --out."""
    nbest_out: Annotated[Path | None, shown("FILE", "none")] = None
    """Also write the --nbest most probable word sequences of each recording, with their costs.
    -: to standard output, in place of the words if there is no --out."""
    longest: Annotated[float | None, shown("SECONDS", "1.5 of its training utterances, 5 to 30 s")] = None
    """Cut longer recordings at pauses, because a model recognises best what is as long as its training
    utterances."""
    channel: Annotated[
        Channel | Literal["each"] | None,
        CHANNEL_OR_EACH_TEXT,
        shown("N|mix|each", "as for its training data; else files of several are refused"),
    ] = None
    """Channel to recognise in multi-channel files: its number (1 is the first), mix (their mean), or each by
    itself, e.g. for telephone speech with one speaker per channel.
    each: talk.wav then has transcripts talk-1 and talk-2, or talk 1 and talk 2 in a CTM file."""
    search: Annotated[RecognitionOptions, heading("search")] = field(default_factory=RecognitionOptions)
    task: Annotated[str | None, shown("NAME|MODULE:CLASS", "none")] = None
    """Task that the model was trained as, if its network is your own (docs/api.md)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto: on a GPU if there is one, else on the CPU."""
    overwrite: bool = False
    """Replace existing files."""

    def run(self) -> int:
        """Recognise the files and print their words."""
        from speechdp.cli.support.outputs import growing_files  # noqa: PLC0415 - keeps --help fast
        from speechdp.comm.device import choose_device  # noqa: PLC0415
        from speechdp.comm.environment import announced  # noqa: PLC0415
        from speechdp.decode.kept_graph import KeptGraph  # noqa: PLC0415
        from speechdp.decode.origin import is_ctc  # noqa: PLC0415
        from speechdp.decode.transcribe import Transcriber, kept_data  # noqa: PLC0415
        from speechdp.process.garbage import look_for_garbage_as_usual  # noqa: PLC0415
        from speechdp.tasks.model_file import load_model  # noqa: PLC0415
        from speechdp.tasks.registry import networks_of  # noqa: PLC0415

        look_for_garbage_as_usual()
        launch = announced()
        if launch is not None and launch.size > 1:
            raise ConfigError(
                f"transcribe runs on one rank, not {launch.size}; give it without mpirun or srun"
            )
        printed, outputs = self._printed(), self._outputs()
        files = self._files()
        _refuse_to_replace(files.values(), outputs)
        device = choose_device(self.device, 0)
        trained = load_model(self.run_dir, device, ctc=True, own=networks_of(self.task))
        if is_ctc(trained.config):
            self.search.refuse_weights(*WITHOUT_EFFECT_ON_CTC)
        kept = kept_data(self.run_dir)
        recordings = _recordings(files, kept.channel if self.channel is None else self.channel)
        graph = KeptGraph(self.run_dir)
        transcriber = Transcriber(trained, kept, self._options(kept), self.longest, graph)
        if transcriber.remark:
            warn(transcriber.remark)
        done = _Done(kept.sampling_rate)
        with growing_files(list(outputs), "recording", overwrite=self.overwrite) as add:
            for recording in recordings:
                try:
                    found = transcriber.transcribe(recording)
                except SeveralChannelsError as error:
                    print_message(f"{error.fault}; {_CHANNELS}")
                    continue
                except ConfigError as error:  # one bad file must not cost the others
                    print_message(str(error))
                    continue
                for remark in done.count(found, recording.audio):
                    print_message(remark)
                if printed is not None:
                    print(printed(found), end="", flush=True)
                add([text_of(found) for text_of in outputs.values()])
        if done.recordings:
            print(done.summary(), file=sys.stderr)
        return 0 if done.recordings == len(recordings) else exit_codes.FAILED

    def _written(self) -> tuple[tuple[Path | None, Callable[[Transcription], str]], ...]:
        """Return the paths of --out, --ctm and --nbest-out, each with the function that formats its text."""
        from speechdp.decode.transcribe import Transcription  # noqa: PLC0415

        return (
            (self.out, Transcription.line),
            (self.ctm, Transcription.ctm),
            (self.nbest_out, Transcription.nbest),
        )

    def _printed(self) -> Callable[[Transcription], str] | None:
        """Return the formatter of standard output: that of the output named `-`, else the words.

        Raises:
            ConfigError: several outputs are named `-`.
        """
        named = [text_of for given, text_of in self._written() if given == _STANDARD_OUTPUT]
        if len(named) > 1:
            raise ConfigError(
                "only one of --out, --ctm and --nbest-out can be - (standard output); give files for others"
            )
        if named or self.out is not None:
            return named[0] if named else None
        return self._written()[0][1]

    def _outputs(self) -> dict[Path, Callable[[Transcription], str]]:
        """Return the given output files, each with the function that formats a recording for it.

        Raises:
            ConfigError: a file cannot be written.
        """
        from speechdp.cli.support.outputs import output_file, partial_of  # noqa: PLC0415

        if (self.nbest_out is None) != (self.search.nbest == 0):
            raise ConfigError("--nbest N and --nbest-out FILE go together; give both or neither")
        outputs: dict[Path, Callable[[Transcription], str]] = {}
        taken: set[str] = set()
        for given, text_of in self._written():
            if given is None or given == _STANDARD_OUTPUT:
                continue
            place = output_file(given, overwrite=self.overwrite)
            output_file(partial_of(place), overwrite=self.overwrite)
            own = {os.path.realpath(path) for path in (place, partial_of(place))}
            if own & taken:
                raise ConfigError(
                    "two of --out, --ctm and --nbest-out are the same file, or would be while one is written "
                    "(NAME.partial); give one for each"
                )
            taken |= own
            outputs[place] = text_of
        return outputs

    def _options(self, kept: Dataset) -> DecodingOptions:
        """Return the options with the tuned weights, unless weights are given; print which are used."""
        from speechdp.decode.transcribe import grammar_of  # noqa: PLC0415

        earlier = self.search.earlier_weights(self.run_dir, grammar_of(kept))
        if earlier.line:
            print_message(earlier.line)
        return self.search.with_weights(earlier.weights).decoding()

    def _files(self) -> dict[str, Path]:
        """Return the given files and those in the given folders, by name.  Raises ConfigError."""
        from speechdp.data.corpora.audio_folder import (  # noqa: PLC0415
            find_audio,
            recording_names,
            without_converted,
        )
        from speechdp.data.corpora.manifest import is_manifest  # noqa: PLC0415
        from speechdp.parallel.run_files import RunDirectory  # noqa: PLC0415

        if not self.files:
            raise UsageError("no audio files given; name some after RUN, or a folder that holds some")
        if Path("-") in self.files:
            raise ConfigError("-: sound is not read from standard input; write it to a file first")
        found: dict[str, Path] = {}
        for given in without_converted(self.files):
            if is_manifest(given):
                raise ConfigError(
                    f"{given}: is a table by its name, not an audio file; give the audio files, or recognise "
                    "what it lists by prepare --like and decode"
                )
            try:
                files = find_audio(given, unreadable=True) if given.is_dir() else [given]
            except ConfigError:
                if not RunDirectory(given).is_begun:
                    raise
                raise ConfigError(
                    f"{given}: is a run, and holds no audio; RUN stands first: transcribe RUN FILE|FOLDER ..."
                ) from None
            for path, name in recording_names(given if given.is_dir() else given.parent, files).items():
                if name in found and path.absolute() == found[name].absolute():
                    raise ConfigError(f"{path}: is given twice; leave one out")
                if name in found:
                    raise ConfigError(
                        f"{path} and {found[name]} are both named {name}; rename one, or transcribe them "
                        "in two commands"
                    )
                found[name] = path
        return found


def _recordings(files: Mapping[str, Path], channel: Channel | Literal["each"] | None) -> list[Recording]:
    """Return the recordings of the files: whole files or their channels.

    Raises:
        ConfigError: a channel of one file has the name of another file.
    """
    from speechdp.data.signal.audio import file_of  # noqa: PLC0415 - keeps --help fast
    from speechdp.decode.transcribe import recordings_of  # noqa: PLC0415

    found = [recording for name, path in files.items() for recording in recordings_of(name, path, channel)]
    first: dict[str, Recording] = {}
    for recording in found:
        other = first.setdefault(recording.name, recording)
        if other is not recording:
            raise ConfigError(
                f"{file_of(other.audio)} and {file_of(recording.audio)} both have a transcript named "
                f"{recording.name}; rename one, or transcribe them in two commands"
            )
    return found


def _refuse_to_replace(recordings: Iterable[Path], outputs: Iterable[Path]) -> None:
    """Refuse to overwrite an input recording, even with --overwrite.

    Raises:
        ConfigError: names the recording.
    """
    from speechdp.cli.support.outputs import partial_of  # noqa: PLC0415 - keeps --help fast

    written = {os.path.realpath(path) for place in outputs for path in (place, partial_of(place))}
    for recording in recordings:
        if os.path.realpath(recording) in written:
            raise ConfigError(
                f"{recording}: is a recording to be recognised, and --out, --ctm or --nbest-out would "
                "replace it; give another name"
            )


@dataclass
class _Done:
    """Counts what was recognised and how long that took, and makes the messages about it.

    Attributes:
        sampling_rate: sampling rate of the model, in Hz.
        recordings: number of recordings.
        duration_s: their total duration, in seconds.
        failed: number of recordings in which, or in a part of which, nothing was found.
        failed_s: their total duration without a result, in seconds.
    """

    sampling_rate: int
    recordings: int = 0
    duration_s: float = 0.0
    failed: int = 0
    failed_s: float = 0.0
    _has_low_rate: bool = False
    _began: float = field(default_factory=time.monotonic)

    def count(self, found: Transcription, audio: AudioSource) -> Iterator[str]:
        """Count a recording, and yield messages about it.

        Args:
            found: result of its recognition.
            audio: its file, or a channel of it.
        """
        self.recordings += 1
        self.duration_s += found.duration_s
        self.failed_s += found.failed_s
        if found.is_too_short:
            yield f"{audio}: too short to hold a word; leave it out"
        if found.failed_s:
            self.failed += 1
            if self.failed <= _MOST_NAMED:
                part = f"{found.failed_s:.2f} s of its {found.duration_s:.2f} s" if found.words else "it"
                yield f"{audio}: nothing found in {part}"
        if found.sampling_rate < self.sampling_rate and not self._has_low_rate:
            self._has_low_rate = True
            yield (
                f"warning: {audio} has {found.sampling_rate} Hz, less than the "
                f"{self.sampling_rate} Hz that the model was trained on; expect more errors in it and others "
                "like it"
            )

    def summary(self) -> str:
        """Return a line on what was recognised and how long that took."""
        from speechdp.timing.memory import peak_rss_bytes  # noqa: PLC0415 - keeps --help fast

        took_s = time.monotonic() - self._began
        text = f"{counted(self.recordings, 'recording')}, {self.duration_s:,.1f} s in {took_s:,.1f} s"
        if self.duration_s:
            text += f": real-time factor {took_s / self.duration_s:.3f}"
        text += f", peak memory {peak_rss_bytes() / 2**20:,.0f} MiB"
        if self.failed_s:
            text += (
                f"; nothing found in {self.failed_s:,.2f} s of {counted(self.failed, 'recording')}, nor in a "
                "much wider search: check that they hold speech in the language of the model"
            )
        return text
