"""`speechdp decode`: recognise a split with a trained model and count the word errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from speechdp.counting import counted
from speechdp.errors import ConfigError
from speechdp.options.recognition import WITHOUT_EFFECT_ON_CTC, RecognitionOptions
from speechdp.options.shown import heading, shown
from speechdp.process.notices import print_message, warn

if TYPE_CHECKING:
    from speechdp.comm.base import Communicator
    from speechdp.data.shards.dataset import Dataset
    from speechdp.decode.recogniser import DecodingOptions, Normalise
    from speechdp.decode.results import DecodingResult

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
    """First choose the scales and scores of the search that give the fewest word errors on this split.
    The network runs over it only once.  Then decode --split with them.  Later decodings of RUN use them, too.
    Give the same split for both, e.g. dev, to compare models without looking at test."""
    graph: Annotated[Path | None, shown("FILE", "none")] = None
    """Kaldi's HCLG.fst, for a model trained on Kaldi's alignments, in place of lexicon and grammar."""
    words: Annotated[Path | None, shown("FILE", "words.txt beside --graph")] = None
    """Symbol table of the words of --graph."""
    mdl: Annotated[Path | None, shown("FILE", "final.mdl in the folder above --graph's")] = None
    """Kaldi model that --graph was made with; its transition-ids are mapped to pdfs."""
    search: Annotated[RecognitionOptions, heading("search")] = field(default_factory=RecognitionOptions)
    normalise: Annotated[
        Literal["utterance", "speaker"] | None,
        shown("utterance|speaker", "as --tune-on had it; else utterance"),
    ] = None
    """Normalise features over each utterance, as in training, or over each speaker's utterances in the split.
    speaker: better for short utterances; needs data prepared with --store audio and known speakers."""
    backend: Literal["auto", "serial", "horovod", "mpi", "torch"] = "auto"
    """Library the ranks communicate with.
    auto: horovod if installed, else mpi; torch: torch.distributed; serial: a single rank."""
    task: Annotated[str | None, shown("NAME|MODULE:CLASS", "none")] = None
    """Task that the model was trained as, if its network is your own (docs/api.md)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto: on a GPU if there is one, else on the CPU."""

    def check(self) -> None:
        """Refuse options that do not go together.  Raises ConfigError."""
        if self.graph is None and (self.words or self.mdl):
            raise ConfigError("--words and --mdl go with --graph HCLG.fst; add it or leave them out")
        if self.graph is not None and self.grammar != "auto":
            raise ConfigError(f"--graph replaces --grammar {self.grammar}; leave one of them out")
        if self.graph is not None:
            self.search.refuse_weights(("lm_scale", "insertion_log_prob", "silence_probability"), "--graph")

    def run(self) -> int:
        """Decode and print the word error rate."""
        from speechdp.cli.support.ranks import over_ranks  # noqa: PLC0415 - keeps --help fast

        self.check()
        self._decoding_options(self.search)
        return over_ranks(self.backend, self.device, self._on_rank)

    def _on_rank(self, comm: Communicator) -> int:
        from speechdp.comm.device import choose_device  # noqa: PLC0415
        from speechdp.comm.startup.world import check_world  # noqa: PLC0415
        from speechdp.data.shards.dataset import Dataset  # noqa: PLC0415
        from speechdp.data.shards.description import check_description  # noqa: PLC0415
        from speechdp.decode.kept_graph import KeptGraph  # noqa: PLC0415
        from speechdp.decode.origin import is_ctc  # noqa: PLC0415
        from speechdp.decode.split import decode_split, opened_split  # noqa: PLC0415
        from speechdp.decode.tuning import tune  # noqa: PLC0415
        from speechdp.tasks.model_file import load_model  # noqa: PLC0415
        from speechdp.tasks.registry import networks_of  # noqa: PLC0415

        self._decoding_options(self.search)
        dataset = Dataset.open(self.data)
        check_world(comm, {"data checksum": dataset.checksum, "configuration": repr(self)})
        device = choose_device(self.device, comm.local_rank)
        trained = load_model(self.run_dir, device, ctc=True, own=networks_of(self.task))
        if is_ctc(trained.config):
            self.search.refuse_weights(*WITHOUT_EFFECT_ON_CTC)
        if self.graph is None:
            check_description(dataset)
            if comm.rank == 0:
                self._warn_of_changes(dataset)
        options, tuning = self._decoding_options(*self._with_earlier_weights(dataset, comm)), None
        if self.tune_on is not None:
            with opened_split(trained, dataset, self.split, self.run_dir, options, comm):
                pass  # fails before hours of tuning if the split cannot be decoded
            kept = KeptGraph(self.run_dir, comm)
            tuned = tune(trained, dataset, self.tune_on, options, comm, print_line=print_message, kept=kept)
            options, tuning = tuned.options, tuned.record
            if comm.rank == 0:
                print(tuned.summary())
        result = decode_split(trained, dataset, self.split, self.run_dir, options, comm, tuning=tuning)
        if comm.rank == 0:
            self._show(result, dataset)
        return 0

    def _warn_of_changes(self, dataset: Dataset) -> None:
        """Name files of the training data that were changed since: they are used as found."""
        from speechdp.data.shards.description import differing_names  # noqa: PLC0415
        from speechdp.parallel.run_files import TRAINED_ON  # noqa: PLC0415

        kept = self.run_dir / TRAINED_ON
        names = differing_names(dataset, kept)
        if names:
            warn(
                f"{dataset.path}: changed, removed or added since {self.run_dir} was trained: "
                f"{', '.join(names)}; used as found: if that is not meant, make them as in {kept}"
            )

    def _with_earlier_weights(
        self, dataset: Dataset, comm: Communicator
    ) -> tuple[RecognitionOptions, Normalise | None]:
        """Return the search options and the normalisation; those not given come from an earlier tuning.

        Collective.
        """
        from speechdp.decode.graphs.graph import Grammar  # noqa: PLC0415
        from speechdp.decode.transcribe import grammar_of  # noqa: PLC0415

        if self.tune_on is not None:
            return self.search, self.normalise
        found = None
        if comm.rank == 0:
            if self.graph is not None:
                grammar = Grammar.GRAPH
            else:
                grammar = grammar_of(dataset) if self.grammar == "auto" else Grammar(self.grammar)
            found = self.search.earlier_weights(self.run_dir, grammar)
        weights, line, normalise = comm.broadcast_object(found)
        if line and comm.rank == 0:
            print_message(line)
        return self.search.with_weights(weights), self.normalise or normalise

    def _show(self, result: DecodingResult, dataset: Dataset) -> None:
        """Print the result, and write its page."""
        from speechdp.cli.support.console import make_console  # noqa: PLC0415
        from speechdp.report.decoding.page import write_decoding_page  # noqa: PLC0415

        print(f"{result.wer.summary()}; {result.split}, {result.grammar.value}")
        print(result.wer.sentence_summary())
        if result.speakers_remark:
            print(result.speakers_remark)
        if result.name != result.split:
            print_message(
                f"{dataset.path} differs from what {self.run_dir} was trained on; these results are kept "
                f"beside the run's own, as {result.name}"
            )
        if self.tune_on == self.split:
            print("the scales were chosen on this split: on new speech the error rate may be higher")
        if result.unknown_remark:
            print(result.unknown_remark)
        if result.untranscribed:
            untranscribed = counted(result.untranscribed, "utterance")
            print(f"{untranscribed} without a transcript: recognised, but not counted in the error rate")
        if result.retried:
            retried = counted(result.retried, "utterance")
            print(f"{retried} needed a wider beam; without hypothesis: {result.failed}")
        if result.nbest is not None:
            print(result.nbest.summary())
        for remark in filter(None, (result.learnt_remark, result.rescoring_remark)):
            warn(remark)
        if result.speed is not None:
            print(result.speed.summary())
        page = write_decoding_page(result, dataset, self.run_dir)
        make_console().print(page.table, crop=False)
        print(f"hypotheses: {result.hypotheses}")
        print(f"page: {page.html}")

    def _decoding_options(
        self, search: RecognitionOptions, normalise: Normalise | None = None
    ) -> DecodingOptions:
        """Return the recogniser's options.  Raises ConfigError: options that do not go together."""
        from speechdp.decode.graphs.graph import OF_ANY_LENGTH, Grammar  # noqa: PLC0415
        from speechdp.decode.graphs.kaldi_graph import KaldiGraphFiles  # noqa: PLC0415

        grammar = None if self.grammar == "auto" else Grammar(self.grammar)
        if grammar is not None and grammar not in OF_ANY_LENGTH:
            self.search.refuse_weights(("insertion_log_prob",), f"--grammar {self.grammar}")
        if grammar not in (None, Grammar.NGRAM) and self.search.rescore_lm is None:
            self.search.refuse_weights(("lm_scale",), f"--grammar {self.grammar}")
        return search.decoding(
            graph=None if self.graph is None else KaldiGraphFiles.of(self.graph, self.words, self.mdl),
            grammar=grammar,
            normalise=normalise or "utterance",
        )
