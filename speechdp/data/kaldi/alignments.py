"""Read Kaldi's alignments: vectors of transition-ids or pdfs, one per utterance.

Legend: T frames of an utterance.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from speechdp.data.kaldi.model import PdfMap, read_pdf_map
from speechdp.data.kaldi.stream import KaldiStream
from speechdp.errors import ConfigError

_MOST_PDFS = 1 << 20
_SIZED_INT32 = np.dtype([("size", "u1"), ("value", "<i4")])


@dataclass(frozen=True)
class AlignmentSource:
    """The files with alignments.

    Attributes:
        files: archives, read one after the other.
        pdf_map: maps the transition-ids in them to pdfs; None: they hold pdfs.
        num_pdfs: number of pdfs that the model specifies; None: there is no model.
        notices: messages for the user.
    """

    files: tuple[Path, ...]
    pdf_map: PdfMap | None
    num_pdfs: int | None
    notices: tuple[str, ...] = ()

    def pdfs(self) -> Iterator[tuple[str, npt.NDArray[np.int32]]]:
        """Yield every utterance and its (T,) pdfs, in the order of the files.

        Raises:
            ConfigError: an archive is damaged, an id is repeated, or an alignment is of another model.
        """
        seen: set[str] = set()
        for file in self.files:
            for utterance, values, stream in read_int_vectors(file):
                if utterance in seen:
                    raise ConfigError(
                        f"{file}: utterance {utterance} has an alignment already; remove one of the two "
                        "(files of an earlier alignment may have stayed in the folder)"
                    )
                seen.add(utterance)
                yield utterance, self._checked(values, stream)

    def _checked(self, values: npt.NDArray[np.int32], stream: KaldiStream) -> npt.NDArray[np.int32]:
        low, high, what = 0, (self.num_pdfs or _MOST_PDFS) - 1, "pdf"
        if self.pdf_map is not None:
            low, high, what = 1, self.pdf_map.num_transition_ids, "transition-id"
        outside = values[(values < low) | (values > high)]
        if len(outside):
            raise stream.failure(
                f"{what} {outside[0]} is not in {low}..{high}, the file belongs to another model"
            )
        if self.pdf_map is None:
            return values
        fault = self.pdf_map.first_fault(values)
        if fault is not None:
            raise ConfigError(
                f"{stream.path}: utterance {stream.utterance}: the alignment is not a path through "
                f"{self.pdf_map.path} (transition-id {values[fault]} of frame {fault}); give the model it "
                "was made with"
            )
        return self.pdf_map.pdfs[values]


def alignment_source(ali_dir: Path | None, ali_pdf: Path | None) -> AlignmentSource:
    """Find the alignments of a Kaldi system.

    Args:
        ali_dir: holds ali.*.gz (transition-ids) and final.mdl.
        ali_pdf: output of ali-to-pdf; then `ali_dir`, if given, only specifies the number of pdfs.

    Raises:
        ConfigError: files are missing or damaged.
    """
    pdf_map = None if ali_dir is None else read_pdf_map(_model_in(ali_dir))
    num_pdfs = None if pdf_map is None else pdf_map.num_pdfs
    if ali_pdf is not None:
        return AlignmentSource((ali_pdf,), None, num_pdfs)
    assert ali_dir is not None
    numbered = [(re.fullmatch(r"ali\.(\d+)\.gz", path.name), path) for path in ali_dir.glob("ali.*.gz")]
    files = dict(sorted((int(match[1]), path) for match, path in numbered if match))
    if not files:
        raise ConfigError(f"{ali_dir}: has no ali.1.gz; give the folder that Kaldi's align script wrote")
    num_jobs = _num_jobs(ali_dir)
    last, evidence = num_jobs or max(files), "num_jobs says" if num_jobs else "the last one there is"
    if missing := [number for number in range(1, last + 1) if number not in files]:
        raise ConfigError(f"{ali_dir / f'ali.{missing[0]}.gz'}: is missing, {evidence} {last}; copy it too")
    if num_jobs is None:
        return AlignmentSource(tuple(files.values()), pdf_map, num_pdfs)
    # Kaldi does not delete archives of an earlier alignment that had more jobs.
    older = [path.name for number, path in files.items() if not 1 <= number <= num_jobs]
    notices = (f"{ali_dir}: not read, as num_jobs says {num_jobs}: {', '.join(older)}",) if older else ()
    used = tuple(files[number] for number in range(1, num_jobs + 1))
    return AlignmentSource(used, pdf_map, num_pdfs, notices)


def _model_in(ali_dir: Path) -> Path:
    """Return final.mdl.  Raises ConfigError if it is a dangling link; the message names another model."""
    model = ali_dir / "final.mdl"
    if not model.is_symlink() or model.exists():
        return model
    others = [path for path in ali_dir.glob("*.mdl") if path.exists()]
    remedy = "copy the model itself (cp -L)"
    if others:  # steps/train_*.sh number them, final.mdl leads to the last
        last = max(others, key=lambda path: (int(path.stem) if path.stem.isdigit() else -1, path.name))
        remedy = f"ln -sf {last.name} {model}"
    raise ConfigError(f"{model}: is a symbolic link to {model.readlink()}, which does not exist; {remedy}")


def read_int_vectors(path: Path) -> Iterator[tuple[str, npt.NDArray[np.int32], KaldiStream]]:
    """Yield (utterance, values, stream) from an archive of int32 vectors, text or binary, gzip or plain."""
    with KaldiStream(path) as stream:
        while utterance := stream.word():
            stream.utterance = utterance
            if stream.line_is_over:
                yield utterance, np.empty(0, np.int32), stream
            elif stream.is_binary():
                yield utterance, _sized_integers(stream), stream
            else:
                yield utterance, _integers(stream), stream
            stream.utterance = ""


def _sized_integers(stream: KaldiStream) -> npt.NDArray[np.int32]:
    """Read the output of Kaldi's BasicVectorHolder: the length and every value, each after a byte 4."""
    length = stream.sized_int32("the length of the alignment")
    raw = stream.take(length * _SIZED_INT32.itemsize, f"an alignment of {length} numbers")
    sized = np.frombuffer(raw, dtype=_SIZED_INT32)
    if (sized["size"] != 4).any():
        raise stream.failure("a number of the alignment has not 4 bytes")
    return sized["value"].astype(np.int32)


def _integers(stream: KaldiStream) -> npt.NDArray[np.int32]:
    try:
        return np.array(stream.line().split(), dtype=np.int32)
    except (ValueError, OverflowError) as error:
        raise stream.failure("the line before holds something else than whole numbers") from error


def _num_jobs(ali_dir: Path) -> int | None:
    """Return how many archives Kaldi's script has written; None: the folder has no such record."""
    file = ali_dir / "num_jobs"
    text = file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else None
