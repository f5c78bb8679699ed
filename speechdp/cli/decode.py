"""`speechdp decode`: recognise a split with a trained model and count the word errors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from speechdp.errors import ConfigError
from speechdp.options.shown import shown

if TYPE_CHECKING:
    from speechdp.comm.base import Communicator
    from speechdp.decode.recognise import DecodingOptions

GrammarName = Literal["auto", "ngram", "digit-loop", "word-loop", "word", "transcript-set"]


@dataclass(frozen=True)
class DecodeCommand:
    """Recognise the speech of a split with a trained model and compute the word error rate."""

    run_dir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Run directory written by `speechdp train`."""
    data: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DATA")]
    """Data directory written by `speechdp prepare`."""
    split: Annotated[str, shown("SPLIT")] = "test"
    """Split to decode."""
    grammar: GrammarName = "auto"
    """Word sequences that can be recognised.
    ngram: any words, by the language model of DATA (prepare --lm-order or --lm); digit-loop: any digits;
    word-loop: any words; word: a single word; transcript-set: one of the transcripts.
    auto: ngram if DATA has a language model; else digit-loop if all reference words are digits; else
    word-loop."""
    tune_on: Annotated[str | None, shown("SPLIT", "none")] = None
    """Choose --acoustic-scale, --lm-scale and --insertion-log-prob by the word errors of this split first.
    The network runs over it once; then SPLIT is decoded with the best setting."""
    graph: Annotated[Path | None, shown("FILE", "none")] = None
    """Kaldi's HCLG.fst, for a model trained on Kaldi's alignments, in place of lexicon and grammar."""
    words: Annotated[Path | None, shown("FILE", "words.txt beside --graph")] = None
    """Symbol table of the words of --graph."""
    mdl: Annotated[Path | None, shown("FILE", "final.mdl in the folder above --graph's")] = None
    """Kaldi model that --graph was made with; its transition-ids are mapped to pdfs."""
    beam: Annotated[float, shown("NATS")] = 16.0
    """Search beam; smaller is faster, larger makes fewer search errors."""
    max_active: Annotated[int, shown("PATHS")] = 10_000
    """Maximum number of active search paths at each frame."""
    acoustic_scale: float = 1.0
    """Scale of the acoustic log-likelihoods."""
    prior_scale: float = 1.0
    """Exponent of the class priors by which the posteriors are divided, 0 (no division) to 1."""
    insertion_log_prob: float = 0.0
    """Word insertion score in nats, added for each word of ngram and of the loop grammars.
    Negative values give fewer words."""
    lm_scale: float = 1.0
    """Scale of the language model's costs (--grammar ngram)."""
    silence_probability: float = 0.5
    """Probability of silence at each word boundary."""
    backend: Literal["auto", "serial", "horovod", "mpi", "torch"] = "auto"
    """Library the ranks communicate with.
    auto: horovod if installed, else mpi; torch: torch.distributed; serial: a single rank."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto: on a GPU if there is one, else on the CPU."""

    def run(self) -> int:
        """Decode and print the word error rate."""
        from speechdp.cli.support.distributed import over_ranks  # noqa: PLC0415 - keeps --help fast

        return over_ranks(self.backend, self.device, self._on_rank)

    def _on_rank(self, comm: Communicator) -> int:
        from speechdp.comm.startup.device import choose_device  # noqa: PLC0415
        from speechdp.comm.startup.world import check_world  # noqa: PLC0415
        from speechdp.data.shards.dataset import Dataset  # noqa: PLC0415
        from speechdp.decode.recognise import decode_split  # noqa: PLC0415
        from speechdp.decode.tuning import tune  # noqa: PLC0415
        from speechdp.tasks.model_file import load_model  # noqa: PLC0415

        options = self._decoding_options()
        if self.tune_on == self.split:
            raise ConfigError(
                f"--tune-on {self.tune_on}: is the split to be decoded, which judges the settings; name "
                "another"
            )
        dataset = Dataset.open(self.data)
        check_world(comm, {"data checksum": dataset.checksum, "configuration": repr(self)})
        trained = load_model(self.run_dir, choose_device(self.device, comm.local_rank))
        tuning = None
        if self.tune_on is not None:
            tuned = tune(trained, dataset, self.tune_on, options, comm)
            options, tuning = tuned.options, tuned.record
            if comm.rank == 0:
                print(tuned.summary())
        result = decode_split(trained, dataset, self.split, self.run_dir, options, comm, tuning=tuning)
        if comm.rank == 0:
            print(f"{result.wer.summary()}; {result.split}, {result.grammar.value}")
            if result.unknown_words:
                share = 100 * result.unknown_words / result.wer.words
                print(f"{result.unknown_words} words ({share:.1f} %) are not in the vocabulary: all errors")
            if result.retried:
                print(
                    f"{result.retried} utterance(s) needed a wider beam; {result.failed} have no hypothesis"
                )
            print(f"hypotheses: {result.hypotheses}")
        return 0

    def _decoding_options(self) -> DecodingOptions:
        from speechdp.decode.graph import Grammar  # noqa: PLC0415
        from speechdp.decode.kaldi_graph import KaldiGraphFiles  # noqa: PLC0415
        from speechdp.decode.recognise import DecodingOptions  # noqa: PLC0415

        if self.graph is None and (self.words or self.mdl):
            raise ConfigError("--words and --mdl go with --graph HCLG.fst; add it or leave them out")
        if self.graph is not None and self.grammar != "auto":
            raise ConfigError(f"--graph replaces --grammar {self.grammar}; leave one of them out")
        return DecodingOptions(
            graph=None if self.graph is None else KaldiGraphFiles.of(self.graph, self.words, self.mdl),
            grammar=None if self.grammar == "auto" else Grammar(self.grammar),
            beam=self.beam,
            max_active=self.max_active,
            acoustic_scale=self.acoustic_scale,
            prior_scale=self.prior_scale,
            insertion_log_prob=self.insertion_log_prob,
            lm_scale=self.lm_scale,
            silence_probability=self.silence_probability,
        )
