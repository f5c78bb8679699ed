"""`speechdp synthesize`: speak texts with a trained model, or measure the speech of held-out texts."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from speechdp.cli.decode import GrammarName
from speechdp.cli.support.outputs import output_file
from speechdp.errors import ConfigError, UsageError
from speechdp.options.shown import shown
from speechdp.process.notices import print_message

if TYPE_CHECKING:
    import torch

    from speechdp.comm.base import Communicator
    from speechdp.synthesis.generate import Synthesiser
    from speechdp.synthesis.recognition import SpeechListener

_ENDINGS = {
    "stop": "",
    "attention": "; it did not stop by itself and was ended where attention rested on the text's end",
    "limit": "; it did not stop by itself and was cut at --max-seconds",
}


#: File systems allow 255 bytes; while a file is being written, its name is a little longer.
_MAX_NAME_BYTES = 240


@dataclass(frozen=True)
class SynthesizeCommand:
    """Turn texts into speech, or measure how good the speech of held-out texts is.

    Speak texts: speechdp synthesize RUN "three five seven" -o out.wav [--picture]

    Measure: speechdp synthesize RUN --data DATA [--recogniser AM_RUN --recogniser-data AM_DATA]"""

    run_dir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Run directory written by `speechdp train DATA RUN --task synthesis`."""
    texts: Annotated[tyro.conf.Positional[tuple[str, ...]], shown("[TEXT ...]", "none")] = ()
    """Texts to speak; several texts become OUT-1.wav, OUT-2.wav, ..."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = Path("speech.wav")
    """WAV file (16 bit) to write."""
    lexicon: Annotated[Path | None, shown("FILE", "none: words of the training data")] = None
    """Pronunciations of the texts' words, for a model of phones (prepare --input phones).
    A Kaldi lexicon.txt in the phones of the model; words that it lacks are said as in training."""
    picture: bool = False
    """Also write a PNG of the attention and the spectrograms next to each WAV file."""
    data: Annotated[Path | None, shown("DATA", "none: speak the texts given")] = None
    """Data directory whose held-out texts are spoken and compared with their recordings."""
    split: Annotated[str, shown("SPLIT")] = "test"
    """Split of --data to measure on."""
    max_utterances: Annotated[int, shown("N")] = 0
    """Measure on at most this many utterances, spread evenly over the split; 0: all."""
    recogniser: Annotated[Path | None, shown("RUN", "none")] = None
    """Run directory of an acoustic model that recognises the speech, to measure its word error rate."""
    recogniser_data: Annotated[Path | None, shown("DATA", "none")] = None
    """Data directory that --recogniser was trained on; needed with it."""
    grammar: GrammarName = "auto"
    """Word sequences that the recogniser allows; see `speechdp decode --help`."""
    iterations: Annotated[int, shown("N")] = 60
    """Iterations of Griffin-Lim, which turns spectrograms into waveforms."""
    max_seconds: Annotated[float, shown("SECONDS")] = 20.0
    """Maximum length of an utterance; the model is stopped there if it does not stop by itself."""
    attention_end: bool = True
    """Also end an utterance when the attention has stayed at the end of the text."""
    dropout: bool = True
    """Keep the dropout of the decoder's pre-net on, as in training, so that each seed speaks differently.
    Without it, models trained on little speech tend to repeat themselves and to end late."""
    seed: Annotated[int, shown("SEED")] = 1
    """Seed for --dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto: on a GPU if there is one, else on the CPU."""
    overwrite: bool = False
    """Replace existing WAV and PNG files."""

    def run(self) -> int:
        """Speak the texts, or measure; return the exit code."""
        from speechdp.cli.support.ranks import over_ranks  # noqa: PLC0415 - keeps --help fast

        self._check()
        return over_ranks("auto", self.device, self._on_rank)

    def _check(self) -> None:
        if self.recogniser is not None and self.data is None:
            raise ConfigError("--recogniser recognises the texts of a data directory; add --data")
        if bool(self.texts) == (self.data is not None):
            raise UsageError(
                'give either texts to speak (speechdp synthesize RUN "three five seven" -o out.wav) or --data'
            )
        if self.lexicon is not None and not self.texts:
            raise ConfigError("--lexicon goes with texts to speak; those of --data have the symbols of DATA")
        if (self.recogniser is None) != (self.recogniser_data is None):
            raise ConfigError("--recogniser and --recogniser-data belong together; give both")
        if self.data is None:
            self._refuse_given(("split", "max_utterances"), "goes with --data")
        else:
            self._refuse_given(("out", "picture", "overwrite"), "goes with texts to speak, not with --data")
        if self.recogniser is None:
            self._refuse_given(("grammar",), "goes with --recogniser")
        if self.texts and self.out.suffix.lower() != ".wav":
            raise ConfigError(f"{self.out}: only WAV is written; give a name that ends in .wav")
        for path in self._outputs() if self.texts else ():
            self._check_output(path)

    def _refuse_given(self, names: tuple[str, ...], why: str) -> None:
        """Refuse options that would be ignored.  Raises ConfigError naming the first."""
        for name in names:
            if getattr(self, name) != getattr(SynthesizeCommand, name):
                raise ConfigError(f"--{name.replace('_', '-')} {why}; leave it out")

    def _check_output(self, path: Path) -> None:
        """Refuse output files that cannot be written.  Raises ConfigError."""
        num_bytes = len(os.fsencode(path.name))
        if num_bytes > _MAX_NAME_BYTES:
            raise ConfigError(
                f"{path.name[:30]}...: the name has {num_bytes} bytes; give one of at most {_MAX_NAME_BYTES}"
            )
        output_file(path, overwrite=self.overwrite)

    def _outputs(self) -> list[Path]:
        """Return the files to write: each WAV file, followed by its PNG."""
        number_of_digits = len(str(len(self.texts)))
        waves = [
            self.out.with_name(f"{self.out.stem}-{number:0{number_of_digits}}{self.out.suffix}")
            for number in range(1, len(self.texts) + 1)
        ]
        waves = waves if len(self.texts) > 1 else [self.out]
        return [
            path for wave in waves for path in ([wave, wave.with_suffix(".png")] if self.picture else [wave])
        ]

    def _on_rank(self, comm: Communicator) -> int:
        from speechdp.comm.device import choose_device  # noqa: PLC0415
        from speechdp.synthesis.generate import GenerateOptions, Synthesiser  # noqa: PLC0415
        from speechdp.tasks.model_file import load_synthesis_model  # noqa: PLC0415

        if comm.size > 1:
            raise ConfigError(f"synthesize runs on one rank, not {comm.size}")
        options = GenerateOptions(
            self.iterations, self.max_seconds, self.seed, self.dropout, self.attention_end
        )
        device = choose_device(self.device, comm.local_rank)
        synthesiser = Synthesiser(load_synthesis_model(self.run_dir, device), options)
        if self.data is None:
            return self._synthesize(synthesiser)
        return self._measure(synthesiser, self.data, device)

    def _synthesize(self, synthesiser: Synthesiser) -> int:
        from speechdp.labels.lexicon import Lexicon  # noqa: PLC0415
        from speechdp.synthesis.generate import write_wav  # noqa: PLC0415

        if self.lexicon is not None:
            synthesiser = synthesiser.with_lexicon(self.texts, Lexicon.load(self.lexicon))
        loaded = synthesiser.loaded
        encoded = synthesiser.encode(self.texts)
        outputs = (output_file(path, overwrite=True) for path in self._outputs())
        for number, speech in sorted(synthesiser.say(encoded)):
            path, text = next(outputs), self.texts[number]
            samples = synthesiser.samples(speech.linear)
            write_wav(path, samples, loaded.sampling_rate)
            seconds = len(samples) / loaded.sampling_rate
            print(f"{path}: {seconds:.2f} s, {loaded.sampling_rate} Hz{_ENDINGS[speech.ending]}")
            if self.picture:
                from speechdp.synthesis.pictures import draw_picture  # noqa: PLC0415
                from speechdp.synthesis.showcase import picture_of  # noqa: PLC0415

                picture = next(outputs)
                draw_picture(picture_of(text, encoded[number], speech, loaded), picture)
                print(f"{picture}: attention and spectrograms")
        return 0

    def _measure(self, synthesiser: Synthesiser, data: Path, device: torch.device) -> int:
        from rich.console import Console  # noqa: PLC0415

        from speechdp.cli.support.console import make_console  # noqa: PLC0415
        from speechdp.cli.support.progress import progress_bar  # noqa: PLC0415
        from speechdp.cli.support.synthesis_table import print_result  # noqa: PLC0415
        from speechdp.data.shards.dataset import Dataset  # noqa: PLC0415
        from speechdp.decode.graphs.graph import Grammar  # noqa: PLC0415
        from speechdp.synthesis.held_out import EvaluationRequest, evaluate_split  # noqa: PLC0415

        request = EvaluationRequest(
            self.run_dir,
            self.split,
            self.max_utterances,
            listener=self._listener(device),
            grammar=None if self.grammar == "auto" else Grammar(self.grammar),
        )
        with progress_bar(Console(stderr=True)) as progress:
            result = evaluate_split(
                synthesiser,
                Dataset.open(data),
                request,
                lambda done, total: progress("synthesising", done, total),
            )
        path = result.write(self.run_dir)
        print_result(make_console(), result)
        print(f"{path}; pictures and sound: {', '.join(str(self.run_dir / p) for p in result.pictures)}")
        return 0

    def _listener(self, device: torch.device) -> SpeechListener | None:
        from speechdp.decode.graphs.graph import Grammar  # noqa: PLC0415
        from speechdp.decode.transcribe import grammar_of  # noqa: PLC0415
        from speechdp.decode.tuning import earlier_weights  # noqa: PLC0415
        from speechdp.synthesis.recognition import SpeechListener  # noqa: PLC0415

        if self.recogniser is None or self.recogniser_data is None:
            return None
        listener = SpeechListener.load(self.recogniser, self.recogniser_data, device)
        grammar = grammar_of(listener.dataset) if self.grammar == "auto" else Grammar(self.grammar)
        earlier = earlier_weights(self.recogniser, grammar)
        if earlier.line:
            print_message(earlier.line)
        return dataclasses.replace(listener, weights=earlier.weights)
