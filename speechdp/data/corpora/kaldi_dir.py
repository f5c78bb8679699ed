"""Read a Kaldi data directory: wav.scp, text and utt2spk."""

from __future__ import annotations

from pathlib import Path

from speechdp.data.corpora.corpus import Corpus, CorpusUtterance, file_lines
from speechdp.errors import ConfigError


def is_kaldi_dir(source: Path) -> bool:
    """Tell whether a folder is a Kaldi data directory."""
    return (source / "wav.scp").is_file()


def read_kaldi_dir(source: Path) -> Corpus:
    """Read the utterances of a Kaldi data directory; transcripts keep their case.

    Audio paths are looked up as Kaldi does (from the working directory), then from the directory itself.

    Raises:
        ConfigError: `segments`, a pipe in wav.scp, a malformed line, an id given twice, or ids that do
            not agree between the files; names the file and line, and the remedy.
    """
    if (source / "segments").exists():
        raise ConfigError(
            f"{source / 'segments'}:1: segments are not read; cut the recordings first, e.g. with Kaldi's "
            "utils/data/extract_wav_segments_data_dir.sh"
        )
    audio = read_wav_scp(source)
    texts = read_table(source / "text", may_be_empty=True)
    speakers = read_table(source / "utt2spk")
    _check_same(source, audio, texts, "text")
    _check_same(source, audio, speakers, "utt2spk")
    return Corpus.of(source, (CorpusUtterance(u, speakers[u], texts[u], audio[u]) for u in audio))


def read_table(path: Path, *, may_be_empty: bool = False) -> dict[str, str]:
    """Read lines of a key and a value; the value is the rest of the line.

    Raises:
        ConfigError: a key without value (unless `may_be_empty`) or a key given twice.
    """
    table: dict[str, str] = {}
    for number, line in file_lines(path):
        key, *rest = line.split(maxsplit=1)
        if not rest and not may_be_empty:
            raise ConfigError(f"{path}:{number}: {line!r} has one field; write an utterance id and its value")
        if key in table:
            raise ConfigError(f"{path}:{number}: {key} is here a second time; remove one of the lines")
        table[key] = rest[0] if rest else ""
    return table


def read_wav_scp(source: Path) -> dict[str, Path]:
    """Read which audio file each recording is.

    Raises:
        ConfigError: no such file, a pipe, a malformed line or an id given twice.
    """
    path = source / "wav.scp"
    for number, line in file_lines(path):
        if line.endswith("|"):
            raise ConfigError(
                f"{path}:{number}: a pipe ({line.split()[0]}) is not run; write its output to a file, "
                "e.g. with Kaldi's wav-copy, and name that file here"
            )
    return {key: find_file(source, value) for key, value in read_table(path).items()}


def find_file(source: Path, value: str) -> Path:
    """Look a path up as Kaldi does, from the working directory, then from the folder `source`."""
    path = Path(value)
    if not path.is_absolute() and not path.exists() and (source / path).exists():
        return source / path
    return path  # if it is missing, opening it says so


def _check_same(source: Path, audio: dict[str, Path], table: dict[str, str], name: str) -> None:
    missing = sorted(audio.keys() - table.keys())
    extra = sorted(table.keys() - audio.keys())
    if missing or extra:
        utterance, there, absent = (missing[0], "wav.scp", name) if missing else (extra[0], name, "wav.scp")
        raise ConfigError(
            f"{source / absent}: lacks utterance {utterance} of {there} ({len(missing) + len(extra)} ids "
            "differ); run Kaldi's utils/fix_data_dir.sh"
        )
