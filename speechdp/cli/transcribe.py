"""`speechdp transcribe`: recognise audio files with a trained model."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from speechdp import exit_codes
from speechdp.errors import ConfigError
from speechdp.options.shown import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    longest: Annotated[float, shown("SECONDS")] = 30.0
    """Cut recordings that are longer than this, at pauses."""
    beam: Annotated[float, shown("NATS")] = 16.0
    """Search beam; smaller is faster, larger makes fewer search errors."""
    max_active: Annotated[int, shown("PATHS")] = 10_000
    """Maximum number of active search paths at each frame."""
    acoustic_scale: float = 1.0
    """Scale of the acoustic log-likelihoods; `decode --tune-on dev` finds one."""
    prior_scale: float = 1.0
    """Exponent of the class priors by which the posteriors are divided, 0 (no division) to 1."""
    insertion_log_prob: float = 0.0
    """Word insertion score in nats, added for each word.  Negative values give fewer words."""
    lm_scale: float = 1.0
    """Scale of the language model's log-probabilities."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto: on a GPU if there is one, else on the CPU."""
    overwrite: bool = False
    """Replace existing files."""

    def run(self) -> int:
        """Recognise the files and print their words."""
        from speechdp.comm.startup.device import choose_device  # noqa: PLC0415 - keeps --help fast
        from speechdp.decode.transcribe import Transcriber, kept_data  # noqa: PLC0415
        from speechdp.files import write_text_atomically  # noqa: PLC0415
        from speechdp.tasks.model_file import load_model  # noqa: PLC0415

        self._check_outputs()
        recordings = self._recordings()
        trained = load_model(self.run_dir, choose_device(self.device, 0))
        transcriber = Transcriber(trained, kept_data(self.run_dir), self._options(), self.longest)
        found: list[Transcription] = []
        began = time.monotonic()
        for name, path in recordings.items():
            try:
                found.append(transcriber.transcribe(path, name))
            except ConfigError as error:  # one bad file of many does not cost the others
                print(f"speechdp: {error}", file=sys.stderr)
                continue
            if self.out is None:
                print(found[-1].line(), end="", flush=True)
        took = time.monotonic() - began
        if self.out is not None:
            write_text_atomically(self.out, "".join(each.line() for each in found))
        if self.ctm is not None:
            write_text_atomically(self.ctm, "".join(each.ctm() for each in found))
        print(_summary(found, took), file=sys.stderr)
        return 0 if len(found) == len(recordings) else exit_codes.FAILED

    def _check_outputs(self) -> None:
        """Refuse files that cannot be written, before the work.  Raises ConfigError."""
        from speechdp.files import cannot_be_written, check_writable  # noqa: PLC0415

        outputs = [path for path in (self.out, self.ctm) if path is not None]
        if len({path.absolute() for path in outputs}) < len(outputs):
            raise ConfigError(f"--out and --ctm are both {self.out}; give two files")
        for path in outputs:
            if path.exists() and not self.overwrite:
                raise ConfigError(f"{path}: exists; give another name or add --overwrite")
            if not path.absolute().parent.is_dir():
                raise ConfigError(f"{path.parent}: no such folder; create it first")
            try:
                check_writable(path.absolute().parent)
            except OSError as error:
                raise ConfigError(cannot_be_written(path, error)) from error

    def _options(self) -> DecodingOptions:
        from speechdp.decode.recognise import DecodingOptions  # noqa: PLC0415

        return DecodingOptions(
            beam=self.beam,
            max_active=self.max_active,
            acoustic_scale=self.acoustic_scale,
            prior_scale=self.prior_scale,
            insertion_log_prob=self.insertion_log_prob,
            lm_scale=self.lm_scale,
        )

    def _recordings(self) -> dict[str, Path]:
        """Return the files given and those in the folders given, by name.  Raises ConfigError."""
        from speechdp.data.corpora.audio_folder import find_audio  # noqa: PLC0415

        if not self.files:
            raise ConfigError("no audio files given; name some after RUN, or a folder that holds some")
        found: dict[str, Path] = {}
        for given in self.files:
            for path in find_audio(given) if given.is_dir() else [given]:
                name = "_".join(path.stem.split())  # names end at a blank, in both files
                if name in found:
                    raise ConfigError(
                        f"{path} and {found[name]} are both named {name}; rename one, or transcribe them "
                        "in two commands"
                    )
                found[name] = path
        return found


def _summary(found: Sequence[Transcription], took_s: float) -> str:
    seconds, failed = (sum(each.duration_s for each in found), sum(each.failed_s for each in found))
    text = f"{len(found)} recording(s), {seconds:,.1f} s in {took_s:,.1f} s"
    if seconds:
        text += f": real-time factor {took_s / seconds:.3f}"
    if failed:
        text += f"; nothing found in {failed:,.1f} s of them: try a wider --beam"
    return text
