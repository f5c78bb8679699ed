"""`speechdp transcribe`: recognise audio files with a trained model."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from speechdp.errors import ConfigError
from speechdp.options.shown import shown

if TYPE_CHECKING:
    from speechdp.decode.recognise import DecodingOptions


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

        for path in filter(None, (self.out, self.ctm)):
            if path.exists() and not self.overwrite:
                raise ConfigError(f"{path}: exists; give another name or add --overwrite")
        recordings = self._recordings()
        trained = load_model(self.run_dir, choose_device(self.device, 0))
        transcriber = Transcriber(trained, kept_data(self.run_dir), self._options(), self.longest)
        texts, words, seconds, failed = [], [], 0.0, 0.0
        began = time.monotonic()
        for path in recordings:
            found = transcriber.transcribe(path)
            texts.append(f"{path.stem} {found.text}".rstrip() + "\n")
            words.append(found.ctm())
            seconds, failed = seconds + found.duration_s, failed + found.failed_s
            if self.out is None:
                print(texts[-1], end="", flush=True)
        took = time.monotonic() - began
        for target, lines in ((self.out, texts), (self.ctm, words)):
            if target is not None:
                write_text_atomically(target, "".join(lines))
        summary = f"{len(recordings)} recording(s), {seconds:,.1f} s in {took:,.1f} s"
        if seconds:
            summary += f": real-time factor {took / seconds:.3f}"
        if failed:
            summary += f"; nothing found in {failed:,.1f} s of them: try a wider --beam"
        print(summary, file=sys.stderr)
        return 0

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

    def _recordings(self) -> list[Path]:
        """Return the files given and those in the folders given.  Raises ConfigError."""
        from speechdp.data.corpora.audio_folder import find_audio  # noqa: PLC0415

        found: list[Path] = []
        for path in self.files:
            found += find_audio(path) if path.is_dir() else [path]
        if not found:
            raise ConfigError("no audio files given; name some after RUN, or a folder that holds some")
        names = [path.stem for path in found]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None and self.ctm is not None:
            raise ConfigError(f"--ctm: two recordings are named {twice}; give them different names")
        return found
