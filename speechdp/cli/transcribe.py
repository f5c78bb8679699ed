"""`speechdp transcribe`: recognise audio files with a trained model."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from speechdp import exit_codes
from speechdp.counting import counted
from speechdp.errors import ConfigError
from speechdp.options.recognition import RecognitionOptions
from speechdp.options.shown import heading, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from speechdp.data.shards.dataset import Dataset
    from speechdp.decode.recognise import DecodingOptions
    from speechdp.decode.transcribe import Transcription


@dataclass(frozen=True)
class TranscribeCommand:
    """Recognise the speech in audio files with a trained model.

    One line a file, its name and its words: speechdp transcribe RUN talk.wav interviews/

    The words are those of the lexicon that the model was trained with; if its training data have a language
    model (prepare --lm-order), that is used."""

    run_dir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Run directory written by `speechdp train`."""
    files: Annotated[tyro.conf.Positional[tuple[Path, ...]], shown("FILE|FOLDER ...")]
    """Audio files of one channel, or folders of them; any sampling rate and length."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"]), shown("FILE", "standard output")] = None
    """Text file to write: a line for each recording, its name and its words."""
    ctm: Annotated[Path | None, shown("FILE", "none")] = None
    """Also write the time of every word and how sure the model is of it, 0 to 1 (a CTM file)."""
    nbest_out: Annotated[Path | None, shown("FILE", "none")] = None
    """Also write the --nbest most probable word sequences of each recording, with their costs."""
    longest: Annotated[float, shown("SECONDS")] = 30.0
    """Cut recordings that are longer than this, at pauses."""
    search: Annotated[RecognitionOptions, heading("search")] = field(default_factory=RecognitionOptions)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto: on a GPU if there is one, else on the CPU."""
    overwrite: bool = False
    """Replace existing files."""

    def run(self) -> int:
        """Recognise the files and print their words."""
        from speechdp.comm.device import choose_device  # noqa: PLC0415 - keeps --help fast
        from speechdp.decode.transcribe import Transcriber, kept_data  # noqa: PLC0415
        from speechdp.files import write_text_atomically  # noqa: PLC0415
        from speechdp.tasks.model_file import load_model  # noqa: PLC0415

        out, ctm, nbest_out = self._places()
        recordings = self._recordings()
        trained = load_model(self.run_dir, choose_device(self.device, 0))
        kept = kept_data(self.run_dir)
        transcriber = Transcriber(trained, kept, self._options(kept), self.longest)
        found: list[Transcription] = []
        began = time.monotonic()
        for name, path in recordings.items():
            try:
                found.append(transcriber.transcribe(path, name))
            except ConfigError as error:  # one bad file of many does not cost the others
                print(f"speechdp: {error}", file=sys.stderr)
                continue
            if found[-1].is_too_short:
                print(f"speechdp: {path}: too short to hold a word; leave it out", file=sys.stderr)
            if self.out is None:
                print(found[-1].line(), end="", flush=True)
        took = time.monotonic() - began
        if out is not None:
            write_text_atomically(out, "".join(each.line() for each in found))
        if ctm is not None:
            write_text_atomically(ctm, "".join(each.ctm() for each in found))
        if nbest_out is not None:
            write_text_atomically(nbest_out, "".join(each.nbest() for each in found))
        print(_summary(found, took), file=sys.stderr)
        return 0 if len(found) == len(recordings) else exit_codes.FAILED

    def _places(self) -> list[Path | None]:
        """Return where --out, --ctm and --nbest-out are written, if they are.

        Raises:
            ConfigError: one of them cannot be; before the work.
        """
        from speechdp.cli.support.outputs import output_file  # noqa: PLC0415

        if (self.nbest_out is None) != (self.search.nbest == 0):
            raise ConfigError("--nbest N and --nbest-out FILE go together; give both or neither")
        given = (self.out, self.ctm, self.nbest_out)
        places = [None if path is None else output_file(path, overwrite=self.overwrite) for path in given]
        written = [path.absolute() for path in places if path is not None]
        if len(set(written)) < len(written):
            raise ConfigError("two of --out, --ctm and --nbest-out are the same file; give one for each")
        return places

    def _options(self, kept: Dataset) -> DecodingOptions:
        """Return the options given, with the weights that were tuned where none are; say which."""
        from speechdp.decode.transcribe import grammar_of  # noqa: PLC0415
        from speechdp.decode.tuning import earlier_weights  # noqa: PLC0415

        if self.search.weights:
            return self.search.decoding()
        weights, line = earlier_weights(self.run_dir, grammar_of(kept), self.search.rescore_lm)
        if line:
            print(f"speechdp: {line}", file=sys.stderr)
        return self.search.with_weights(weights).decoding()

    def _recordings(self) -> dict[str, Path]:
        """Return the files given and those in the folders given, by name.  Raises ConfigError."""
        from speechdp.data.corpora.audio_folder import find_audio, recording_names  # noqa: PLC0415

        if not self.files:
            raise ConfigError("no audio files given; name some after RUN, or a folder that holds some")
        found: dict[str, Path] = {}
        for given in self.files:
            files = find_audio(given, unreadable=True) if given.is_dir() else [given]
            for path, name in recording_names(given if given.is_dir() else given.parent, files).items():
                if name in found:
                    raise ConfigError(
                        f"{path} and {found[name]} are both named {name}; rename one, or transcribe them "
                        "in two commands"
                    )
                found[name] = path
        return found


def _summary(found: Sequence[Transcription], took_s: float) -> str:
    from speechdp.timing.memory import peak_rss_bytes  # noqa: PLC0415 - keeps --help fast

    seconds, failed = (sum(each.duration_s for each in found), sum(each.failed_s for each in found))
    text = f"{counted(len(found), 'recording')}, {seconds:,.1f} s in {took_s:,.1f} s"
    if seconds:
        text += f": real-time factor {took_s / seconds:.3f}"
    text += f", peak memory {peak_rss_bytes() / 2**20:,.0f} MiB"
    if failed:
        text += f"; nothing found in {failed:,.1f} s of them: try a wider --beam"
    return text
