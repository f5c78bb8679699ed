"""Prepare a corpus for a trained model, with its features, rate, classes, lexicon and language model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speechdp.counting import agreeing, counted, counted_clause
from speechdp.data.corpora.corpus import CorpusUtterance
from speechdp.data.prepare.contents import Contents, ShardContent, deal_splits
from speechdp.data.prepare.divided_corpus import DividedCorpus
from speechdp.data.prepare.jobs import Progress
from speechdp.data.prepare.language_model import (
    PreparedLanguageModel,
    Texts,
    prepare_language_model,
    take_over_language_model,
    texts_of,
    users_model,
)
from speechdp.data.prepare.reading import read_whole_corpus
from speechdp.data.prepare.recognition import (
    FlatShard,
    RecognitionLabels,
    frames_of,
    lengths_of,
    read_samples,
    stage_of,
    stored_utterance,
)
from speechdp.data.prepare.vocabulary import plainly_spelt, with_words_of_model
from speechdp.data.shards.dataset import (
    FLAT,
    LANGUAGE_MODEL_NAMES,
    MANIFEST_NAME,
    UNALIGNED,
    Dataset,
)
from speechdp.data.shards.description import check_contents
from speechdp.data.shards.layout import AudioUtterance, ShardHeader, Utterance
from speechdp.decode.language_model import LanguageModel, language_model_path, nothing_fits
from speechdp.errors import ConfigError, ShardError
from speechdp.labels.hmm import StateInventory
from speechdp.labels.kaldi_pdfs import KaldiPdfs, classes_of
from speechdp.labels.lexicon import Lexicon, grapheme_lexicon, has_plain_letters
from speechdp.options.prepare import GRAPHEMES, LanguageModelOptions, PrepareOptions
from speechdp.parallel.run_files import TRAINED_ON, RunDirectory


def open_like(path: Path) -> Dataset:
    """Open the data that a model was trained on: a data directory, or the description that a run keeps.

    Raises:
        ConfigError: it is neither, or a run of an earlier version whose data are gone.
        RunError: the run keeps another description than it wrote.
        ShardError: damaged.
    """
    if (path / MANIFEST_NAME).is_file():
        return Dataset.open(path)
    if (path / TRAINED_ON / MANIFEST_NAME).is_file():
        check_contents(path / TRAINED_ON, [MANIFEST_NAME, "classes.txt"])
        return Dataset.open(path / TRAINED_ON)
    run = RunDirectory(path)
    if not run.is_begun:
        raise ConfigError(f"--like {path}: is neither a run nor a data directory; give one that train wrote")
    data = run.data()
    try:
        dataset = Dataset.open(data.path)
    except ShardError as error:
        raise ConfigError(
            f"--like {path}: keeps no copy of the settings of its data, and {data.path} is gone; give the "
            "data directory it was trained on"
        ) from error
    if dataset.checksum != data.checksum:
        raise ConfigError(
            f"--like {path}: was trained on other data than {data.path} holds now; give the data directory "
            "it was trained on"
        )
    return dataset


def read_corpus_like(options: PrepareOptions, scratch: Path, progress: Progress) -> Contents:
    """Read a corpus for a trained model.

    If every word of every transcript has a pronunciation, targets are a flat alignment, and the data can be
    used for training.  Otherwise there are no targets, and the data can only be decoded.

    Raises:
        ConfigError: the corpus or its audio cannot be used, `options.like` is neither a run nor the data of a
            recogniser, or the lexicon has phones that the model does not know.
    """
    assert options.like is not None
    like = open_like(options.like)
    inventory = _inventory_of(like, options.like)
    users = users_model(options.for_language_model)
    lexicon, spelt = _lexicon(like, options, inventory, () if users is None else users.words)
    corpus = read_whole_corpus(
        options, scratch, progress, needs_text=False, features=lambda rate: like.features
    )
    corpus = plainly_spelt(corpus, lexicon, needs_text=False)
    divided = DividedCorpus.of(corpus, options, progress, like)
    num_frames = frames_of(divided, like.features)
    unknown = Counter(word for u in corpus.utterances for word in u.words if word not in lexicon)
    untranscribed = [u for u in corpus.utterances if not u.words]
    is_aligned = not unknown and not untranscribed
    dealt = deal_splits(divided.splits, lambda u: num_frames[u.audio], options.shards, options.seed)

    def shard(part: tuple[CorpusUtterance, ...]) -> ShardContent:
        return FlatShard.of(part, lexicon, inventory) if is_aligned else UnalignedShard(part)

    model, lacking = _language_model(options, like, lexicon, texts_of(divided.splits), users)
    labels = RecognitionLabels(lexicon, inventory, like.features, like.sampling_rate, model)
    notices = divided.notices + spelt + lacking
    notices += _without_targets(len(untranscribed), len(corpus.utterances), unknown)
    if is_aligned:
        notices += lengths_of(divided, num_frames, lexicon)
    return Contents(
        manifest=labels.manifest(FLAT if is_aligned else UNALIGNED, divided.rule, options),
        shards={name: [shard(part) for part in parts] for name, parts in dealt.items()},
        stage=stage_of(options),
        save=labels.save,
        notices=notices,
    )


@dataclass(frozen=True)
class UnalignedShard:
    """A shard of features or audio without targets: they are stored as 0 and mean nothing."""

    utterances: tuple[CorpusUtterance, ...]

    def ready(self, _path: Path, header: ShardHeader) -> Iterator[Utterance | AudioUtterance]:
        """Yield each utterance with its features (or samples).  Raises ConfigError."""
        for utterance in self.utterances:
            samples, num_frames = read_samples(utterance, header)
            yield stored_utterance(utterance, samples, np.zeros(num_frames, dtype=np.int32), header)


def _inventory_of(like: Dataset, given: Path) -> StateInventory:
    if like.task != "acoustic":
        raise ConfigError(f"--like {given}: is for synthesis; give the run or the data of a recogniser")
    classes = classes_of(like)
    if isinstance(classes, KaldiPdfs):
        raise ConfigError(
            f"--like {given}: its classes are Kaldi's pdfs; prepare Kaldi's data with --kaldi DIR --like"
        )
    return classes


def _lexicon(
    like: Dataset, options: PrepareOptions, inventory: StateInventory, of_model: Collection[str]
) -> tuple[Lexicon, tuple[str, ...]]:
    """Return the user's lexicon, complete, or that of the model's data, and notices.

    Args:
        like: the data of the model.
        options: the choice of lexicon; with graphemes: that of the model's data and the words `of_model`.
        inventory: states of the model's phones.
        of_model: the words of the user's language model.
    """
    if options.lexicon == GRAPHEMES:
        lexicon = _lexicon_of(like)
        # Words with other letters were spelled differently by earlier versions.
        words = list(filter(has_plain_letters, lexicon.recognised_words))
        if grapheme_lexicon(words) != Lexicon({word: lexicon.pronunciations[word] for word in words}):
            raise ConfigError(
                f"--lexicon graphemes: the phones of --like {options.like} are no letters; give a lexicon in "
                f"its phones ({' '.join(inventory.phones[:10])} ...)"
            )
        return with_words_of_model(lexicon, of_model)
    path = like.lexicon_path if options.lexicon is None else options.lexicon
    lexicon = _lexicon_of(like) if options.lexicon is None else Lexicon.load(path)
    strange = [phone for phone in lexicon.phones if phone not in inventory.phones]
    if strange:
        unknown_phones = counted_clause(len(strange), "phone", "are not among those of the model")
        raise ConfigError(
            f"{path}: {unknown_phones}, first {strange[0]}; give a lexicon in its phones "
            f"({' '.join(inventory.phones[:10])} ...)"
        )
    return lexicon, ()


def _lexicon_of(like: Dataset) -> Lexicon:
    check_contents(like.path, [like.lexicon_path.name], "give another with --lexicon FILE")
    return Lexicon.load(like.lexicon_path)


def _language_model(
    options: PrepareOptions, like: Dataset, lexicon: Lexicon, texts: Texts, users: LanguageModel | None
) -> tuple[PreparedLanguageModel | None, tuple[str, ...]]:
    """Return the language model, by default that of the model's data, and notices."""
    if options.for_language_model != LanguageModelOptions():
        return prepare_language_model(options.for_language_model, lexicon, texts, users), ()
    check_contents(like.path, LANGUAGE_MODEL_NAMES, "give another with --lm FILE")
    path = language_model_path(like.path)
    if path is None:
        return None, ()
    model = take_over_language_model(path, lexicon, texts)
    if model is None:
        return None, (f"without a language model: {path}: {nothing_fits(path)}; --lm takes another",)
    return model, ()


def _without_targets(num_untranscribed: int, num_utterances: int, unknown: Counter[str]) -> tuple[str, ...]:
    """Report why there are no targets, and what the data can be used for; empty if there are targets."""
    if num_untranscribed == num_utterances:
        return (
            "no utterance has a transcript: the data can be neither trained on nor decoded, as decode "
            "counts errors; use speechdp transcribe RUN FILES to recognise the words, speechdp posteriors "
            "to score the frames",
        )
    reasons = []
    if num_untranscribed:
        reasons.append(counted_clause(num_untranscribed, "utterance", "have no transcript"))
    if unknown:
        most = " ".join(word for word, _ in unknown.most_common(5))
        reasons.append(
            f"{counted(len(unknown), 'word')} ({counted(unknown.total(), 'occurrence')}) "
            f"{agreeing(len(unknown), 'are')} not in the lexicon and will be errors, e.g. {most}"
        )
    return (f"{'; '.join(reasons)}; the data can be decoded, but not trained on",) if reasons else ()
