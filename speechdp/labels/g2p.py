"""Guess pronunciations from spellings with Phonetisaurus: joint n-grams of letters and phones.

    phonetisaurus-align -> estimate-ngram -> phonetisaurus-arpa2wfst -> phonetisaurus-g2pfst

The optional package phonetisaurus contains these programs.  They learn from a lexicon, or use a given model;
no network is used.

Source: Novak, Minematsu & Hirose, "Phonetisaurus: exploring grapheme-to-phoneme conversion with joint n-gram
models in the WFST framework", Natural Language Engineering 22, 2016.
"""

from __future__ import annotations

import importlib
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from speechdp.errors import ConfigError
from speechdp.labels.lexicon import Lexicon, Pronunciation, is_mark

_ORDER = 8  # of the n-grams, as in phonetisaurus-train
#: One or two letters align with one or two phones, or none.
_ALIGNING = ("--seq1_del=false", "--seq2_del=true", "--seq1_max=2", "--seq2_max=2", "--grow=false")
_APPLYING = "phonetisaurus-g2pfst"
#: Signs that Phonetisaurus writes between letters and phones.
_RESERVED = frozenset("}|_")


def guess_pronunciations(
    words: Collection[str], lexicon: Lexicon, model: Path | None = None, phones: Collection[str] = ()
) -> dict[str, Pronunciation]:
    """Guess the pronunciation of each word, whatever its case.

    A word with hyphens is the sequence of its parts: parts in the lexicon have its pronunciation, the others
    are guessed.

    Args:
        words: the words.
        lexicon: has the parts of words with hyphens, and is what to learn from if there is no model.
        model: a model made by `phonetisaurus-train`, of words in lower case; its phones must be the
            lexicon's.
        phones: phones that it may return besides those of the lexicon.

    Returns:
        One pronunciation per word; marks and words with letters that were never learnt have none.

    Raises:
        ConfigError: Phonetisaurus is needed and is not installed, fails, or returns phones that the lexicon
            lacks.
    """
    parts = {word: parts_of(word) for word in words}
    found = {
        part: lexicon.pronunciations[spelling][0]
        for word, parts_of_word in parts.items()
        for part in parts_of_word
        if part != word and (spelling := lexicon.spelling_of(part)) is not None
    }
    missing = {part for several in parts.values() for part in several} - found.keys()
    found |= _guess(missing, lexicon, model, phones)
    return {
        word: tuple(phone for part in several for phone in found[part])
        for word, several in parts.items()
        if all(part in found for part in several)
    }


def parts_of(word: str) -> list[str]:
    """Return the parts that hyphens join, or the word itself if it is a mark or has no hyphen.

    Example:
        >>> parts_of("well-known")
        ['well', 'known']
    """
    return [word] if is_mark(word) else [part for part in word.split("-") if part] or [word]


def _guess(
    words: Collection[str], lexicon: Lexicon, model: Path | None, phones: Collection[str]
) -> dict[str, Pronunciation]:
    """Guess words without hyphens, as `guess_pronunciations` does."""
    wanted = [word for word in sorted(words) if not is_mark(word) and not _RESERVED & set(word)]
    if not wanted:
        return {}
    programs = _Programs()
    with tempfile.TemporaryDirectory(prefix="speechdp-g2p-") as folder:
        if model is not None:
            if not model.is_file():
                raise ConfigError(f"--g2p-model {model}: no such file; give what phonetisaurus-train wrote")
            found = _apply(programs, Path(folder), wanted, model)
        else:
            # Phones get names of our own here: those of a lexicon may contain reserved signs.
            codes = {phone: f"P{i}" for i, phone in enumerate(_phones(lexicon))}
            letters = _write_entries(Path(folder) / "entries", lexicon, codes)
            wanted = [word for word in wanted if set(word.lower()) <= letters]
            names = {code: phone for phone, code in codes.items()}
            coded = _apply(programs, Path(folder), wanted, _learn(programs, Path(folder)))
            found = {word: tuple(names[code] for code in phones) for word, phones in coded.items()}
    guessed = {phone for pronunciation in found.values() for phone in pronunciation}
    strange = sorted(guessed - {*_phones(lexicon), *phones})
    if strange and lexicon.pronunciations:
        raise ConfigError(
            f"--g2p-model {model}: {len(strange)} of its phones are not in the lexicon, first {strange[0]}; "
            "give a model trained on a lexicon with these phones"
        )
    return found


def _phones(lexicon: Lexicon) -> list[str]:
    """Return all phones of a lexicon, sorted, including silence within a word."""
    return sorted(
        {p for variants in lexicon.pronunciations.values() for variant in variants for p in variant}
    )


def _write_entries(path: Path, lexicon: Lexicon, codes: Mapping[str, str]) -> set[str]:
    """Write the entries to learn from; return all letters."""
    entries = [
        (word.lower(), " ".join(codes[phone] for phone in variant))
        for word, variants in lexicon.pronunciations.items()
        if not is_mark(word) and not _RESERVED & set(word)
        for variant in variants
    ]
    path.write_text("".join(f"{word}\t{phones}\n" for word, phones in entries), encoding="utf-8")
    return {letter for word, _ in entries for letter in word}


def _learn(programs: _Programs, folder: Path) -> Path:
    entries, corpus, arpa, model = (folder / name for name in ("entries", "corpus", "arpa", "model.fst"))
    if entries.stat().st_size:
        programs.run("phonetisaurus-align", f"--input={entries}", f"--ofile={corpus}", *_ALIGNING)
    aligned = corpus.read_text(encoding="utf-8").splitlines() if corpus.exists() else []
    if not any(aligned):
        raise ConfigError(
            "g2p has no pronunciation to learn from: there is none with a phone or two for a letter; give a "
            "larger lexicon, or --g2p-model"
        )
    # With n-grams longer than any entry, that program ends with a segmentation fault.
    longest = max(len(line.split()) for line in aligned)
    programs.run("estimate-ngram", "-o", str(min(_ORDER, longest)), "-t", str(corpus), "-wl", str(arpa))
    programs.run("phonetisaurus-arpa2wfst", f"--lm={arpa}", f"--ofile={model}")
    return model


def _apply(programs: _Programs, folder: Path, words: Sequence[str], model: Path) -> dict[str, Pronunciation]:
    """Return the pronunciation of each word according to a model, in its phones."""
    listed = folder / "words"
    listed.write_text("".join(f"{word.lower()}\n" for word in words), encoding="utf-8")
    if not words:
        return {}
    ended = programs.run(_APPLYING, f"--model={model}", f"--wordlist={listed}", "--nbest=1")
    # Unknown letters are skipped; standard error has a line for each, in quotation marks.
    unknown_letters = {
        line.split("'")[1] for line in ended.stderr.splitlines() if line.startswith("Symbol: '")
    }
    rows = (line.split("\t") for line in ended.stdout.splitlines())
    found = {row[0]: tuple(row[2].split()) for row in rows if len(row) == 3}  # word, cost, phones
    return {
        word: found[word.lower()]
        for word in words
        if found.get(word.lower()) and not unknown_letters & set(word.lower())
    }


class _Programs:
    """The programs of the package phonetisaurus.  Raises ConfigError if it is not installed."""

    def __init__(self) -> None:
        try:
            # Imported by name because it is optional and has no types.
            module: Any = importlib.import_module("phonetisaurus")
        except ImportError as error:
            raise ConfigError(
                "--unknown-words g2p needs the package phonetisaurus; pip install 'speechdp[g2p]'"
            ) from error
        self._environment: dict[str, str] = module.guess_environment()
        self._folder = Path(self._environment["PATH"].split(":", maxsplit=1)[0])

    def run(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a program to its end.  Raises ConfigError if it fails."""
        try:
            return subprocess.run(
                [str(self._folder / name), *arguments],
                env=self._environment,
                capture_output=True,
                text=True,
                encoding="utf-8",
                errors="replace",
                check=True,
            )
        except subprocess.CalledProcessError as error:
            messages = [line for line in error.stderr.splitlines() if not line[:1].isdecimal()]  # no progress
            reason = messages[-1][:200] if messages else f"exit code {error.returncode}"
            what = "--g2p-model that phonetisaurus-train wrote" if name == _APPLYING else "larger lexicon"
            raise ConfigError(
                f"{name} failed ({reason}); give a {what}, or leave --unknown-words g2p out"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"{self._folder / name} does not start ({error.strerror}); phonetisaurus has programs for "
                "Linux on x86_64 alone: leave --unknown-words g2p out"
            ) from error
