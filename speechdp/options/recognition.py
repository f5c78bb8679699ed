"""Search options, shared by all commands that recognise speech.

The docstring under a field is its help on the command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from speechdp.errors import ConfigError
from speechdp.options.shown import shown
from speechdp.parallel.run_files import WEIGHTS

if TYPE_CHECKING:
    from speechdp.decode.graphs.graph import Grammar
    from speechdp.decode.recogniser import DecodingOptions
    from speechdp.decode.tuning import EarlierWeights


#: Weights without effect on CTC models, which have neither priors nor transitions, and the model's name
#: in messages.
WITHOUT_EFFECT_ON_CTC = (("prior_scale", "silence_probability"), "a model of --criterion ctc")


@dataclass(frozen=True)
class RecognitionOptions:
    """How to search, and how to weight the scores of network, language model and lexicon."""

    beam: Annotated[float, shown("NATS")] = 16.0
    """Search beam; smaller is faster, larger makes fewer search errors."""
    max_active: Annotated[int, shown("PATHS")] = 10_000
    """Maximum number of active search paths at each frame."""
    acoustic_scale: Annotated[float | None, shown("FACTOR", "1; or as tuned before")] = None
    """Scale of the acoustic log-likelihoods.
    If none of the scales and scores is given, those that decode --tune-on chose for RUN are used."""
    prior_scale: Annotated[float | None, shown("EXPONENT", "1; or as tuned before")] = None
    """Exponent of the class priors by which the posteriors are divided, 0 (no division) to 1."""
    insertion_log_prob: Annotated[float | None, shown("NATS", "0; or as tuned before")] = None
    """Word insertion score, added for each word (grammar ngram and the loop grammars).
    Negative values give fewer words."""
    lm_scale: Annotated[float | None, shown("FACTOR", "1; or as tuned before")] = None
    """Scale of the language model's log-probabilities (grammar ngram)."""
    silence_probability: Annotated[float | None, shown("P", "0.5; or as tuned before")] = None
    """Probability of silence at each word boundary."""

    nbest: Annotated[int, shown("N", "0: none; 100 with --rescore-lm")] = 0
    """Also find the N most probable word sequences of each utterance, from a lattice."""
    lattice_beam: Annotated[float | None, shown("NATS", "10")] = None
    """Beam of the lattice for --nbest and --rescore-lm; larger finds more word sequences."""
    rescore_lm: Annotated[Path | None, shown("FILE", "none")] = None
    """Rescore the most probable word sequences with this language model (ARPA, plain or gzipped)."""
    rescore_weight: Annotated[float | None, shown("SHARE", "1; decode --tune-on: tuned")] = None
    """Share of --rescore-lm in the log-probability of a word sequence, 0 to 1.
    The rest is the share of the language model used in the search; 1 replaces that model."""

    @property
    def weights(self) -> dict[str, Any]:
        """The scales, scores and probabilities that are given, by name."""
        return {name: value for name in WEIGHTS if (value := getattr(self, name)) is not None}

    def earlier_weights(self, run_dir: Path, grammar: Grammar) -> EarlierWeights:
        """Return the weights that decode --tune-on chose for a run.

        If a weight is given, return none of them, with a line that says what is set aside.

        Args:
            run_dir: the run.
            grammar: grammar of the search.

        Raises:
            RunError: the record of the tuning is damaged.
        """
        from speechdp.decode import tuning  # noqa: PLC0415 - keeps --help fast

        tuned_with = self.rescore_lm if self.rescore_weight is None else None  # a given share is kept
        if self.weights:
            line = tuning.weights_set_aside(run_dir, grammar, self.weights, tuned_with)
            return tuning.EarlierWeights({}, line)
        found = tuning.earlier_weights(run_dir, grammar, tuned_with)
        if found.line and not found.weights:
            found = found._replace(
                line=f"{found.line}; set weights for it with --acoustic-scale and the like"
            )
        return found

    def refuse_weights(self, names: Sequence[str], beside: str) -> None:
        """Refuse weights that have no effect with `beside`.  Raises ConfigError naming the first."""
        for name in names:
            if name in self.weights:
                raise ConfigError(f"--{name.replace('_', '-')} has no effect with {beside}; leave it out")

    def with_weights(self, weights: Mapping[str, Any]) -> RecognitionOptions:
        """Return these options with other weights."""
        return replace(self, **weights)

    def decoding(self, **others: Any) -> DecodingOptions:
        """Return the recogniser's options; it has its own defaults for those not given.

        Args:
            others: options of the recogniser that are not among these.

        Raises:
            ConfigError: a value out of range.
        """
        from speechdp.decode.recogniser import DecodingOptions  # noqa: PLC0415 - keeps --help fast

        lists = {"lattice_beam": self.lattice_beam, "rescore_weight": self.rescore_weight}
        given: dict[str, Any] = {name: value for name, value in lists.items() if value is not None}
        if "rescore_weight" in given and self.rescore_lm is None:
            raise ConfigError("--rescore-weight goes with --rescore-lm FILE; add it or leave the weight out")
        if "lattice_beam" in given and self.nbest == 0 and self.rescore_lm is None:
            raise ConfigError("--lattice-beam goes with --nbest N or --rescore-lm FILE; give one, or drop it")
        return DecodingOptions(
            beam=self.beam,
            max_active=self.max_active,
            nbest=self.nbest,
            rescore_lm=None if self.rescore_lm is None else self.rescore_lm.resolve(),
            **given,
            **self.weights,
            **others,
        )
