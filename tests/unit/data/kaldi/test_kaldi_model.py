"""Transition-ids to pdfs, by models that Kaldi wrote and by made-up ones of every form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from speechdp.data.kaldi.alignments import alignment_source, read_int_vectors
from speechdp.data.kaldi.model import read_pdf_map
from speechdp.errors import ConfigError
from tests.helpers.kaldi_files import (
    PDFS_OF_TRIPLES,
    PDFS_OF_TUPLES,
    ali_dir,
    binary_model,
    some_path,
    text_model,
    write_alignments,
    yesno_system,
)


@pytest.mark.parametrize("form", [binary_model, text_model])
@pytest.mark.parametrize("tuples", [True, False])
def test_all_forms_of_a_model_say_the_same(tmp_path: Path, form, tuples: bool) -> None:
    path = tmp_path / "final.mdl"
    path.write_bytes(form(tuples=tuples))
    pdf_map = read_pdf_map(path)
    assert tuple(pdf_map.pdfs[1:]) == (PDFS_OF_TUPLES if tuples else PDFS_OF_TRIPLES)
    assert pdf_map.num_pdfs == (6 if tuples else 3) and pdf_map.num_transition_ids == 7


def test_kaldis_own_alignment_has_the_frames_a_pdf_that_kaldi_counted() -> None:
    system = yesno_system()
    source = alignment_source(system, None)
    assert (source.pdf_map.num_transition_ids, source.num_pdfs) == (30, 11)
    counts = np.zeros(11, dtype=np.int64)
    for _, pdfs in source.pdfs():
        counts += np.bincount(pdfs, minlength=11)
    # gmm-acc-stats wrote the occupancies of each pdf beside the model.
    assert counts.tolist() == [int(word) for word in (system / "40.occs").read_text().split()[1:-1]]


@pytest.mark.parametrize("form", [binary_model, text_model])
def test_a_model_cut_short_anywhere_is_refused_by_name_and_byte(tmp_path: Path, form) -> None:
    whole = form(tuples=True)
    end = whole.index(b"</Tuples> ")
    path = tmp_path / "final.mdl"
    for length in range(0, end, 3):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"final\.mdl: byte \d+: "):
            read_pdf_map(path)


def test_a_model_with_any_byte_changed_is_read_or_refused_and_nothing_worse(tmp_path: Path) -> None:
    whole = binary_model(tuples=True)
    path = tmp_path / "final.mdl"
    refused = 0
    for position in range(len(whole)):
        for value in (0, 0xFF):
            path.write_bytes(whole[:position] + bytes([value]) + whole[position + 1 :])
            try:
                read_pdf_map(path)
            except ConfigError as error:
                refused += 1
                assert str(error).startswith(f"{path}: byte ") and "\n" not in str(error)
    assert refused > len(whole) / 2  # names and sizes that do not fit; probabilities may be anything


@pytest.mark.parametrize("name", ["ali.1.gz", "ali.ark"])
@pytest.mark.parametrize("text", [True, False])
def test_alignments_are_read_in_every_form(tmp_path: Path, name: str, text: bool) -> None:
    alignments = {"a": [1, 2, 2], "b": [], "ç": [2147483647, 0, -1]}
    path = write_alignments(tmp_path / name, alignments, text=text)
    read = {utterance: values.tolist() for utterance, values, _ in read_int_vectors(path)}
    assert read == alignments


@pytest.mark.parametrize("name", ["ali.1.gz", "ali.ark"])
@pytest.mark.parametrize("text", [True, False])
def test_an_archive_cut_short_is_refused_by_name_utterance_and_byte(
    tmp_path: Path, name: str, text: bool
) -> None:
    values = np.random.default_rng(1).integers(0, 1000, 5000).tolist()  # nothing gzip could shorten much
    path = write_alignments(tmp_path / name, {"utt0": values, "utt1": values[::-1]}, text=text)
    whole = path.read_bytes()
    for keep in (len(whole) * 3 // 4, len(whole) - 15):
        path.write_bytes(whole[:keep])
        reader = read_int_vectors(path)
        assert next(reader)[0] == "utt0"
        with pytest.raises(ConfigError, match=rf"{name}: utterance utt1, byte \d+: .*; copy the file again"):
            list(reader)


def test_gzip_members_in_a_row_are_one_archive_and_a_missing_end_is_noticed(tmp_path: Path) -> None:
    first = write_alignments(tmp_path / "ali.1.gz", {"utt0": [1, 2]})
    second = write_alignments(tmp_path / "ali.2.gz", {"utt1": [3]})
    both = tmp_path / "both.gz"
    both.write_bytes(first.read_bytes() + second.read_bytes() + bytes(512))
    read = {utterance: values.tolist() for utterance, values, _ in read_int_vectors(both)}
    assert read == {"utt0": [1, 2], "utt1": [3]}
    both.write_bytes(first.read_bytes() + second.read_bytes()[:-3])
    with pytest.raises(ConfigError, match=r"both\.gz: byte .*truncated or damaged"):
        list(read_int_vectors(both))


def test_a_damaged_gzip_archive_is_refused_wherever_the_damage_is(tmp_path: Path) -> None:
    values = np.random.default_rng(1).integers(0, 1000, 200).tolist()
    whole = write_alignments(tmp_path / "ali.1.gz", {"utt0": values}).read_bytes()
    damaged = tmp_path / "damaged.gz"
    for position in range(10, len(whole)):  # behind the header, whose time stamp nobody checks
        damaged.write_bytes(whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :])
        with pytest.raises(ConfigError, match=r"damaged\.gz: .*byte \d+: "):
            list(read_int_vectors(damaged))


def test_absurd_lengths_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ali.ark"
    contents = {
        b"utt0 \0B\4\xff\xff\xff\x7f\4\1\0\0\0": "utt0, byte 12: an alignment of 2147483647 numbers",
        b"utt0 \0B\4\xff\xff\xff\xff": "should have -5 bytes",
        b"utt0 \0B\x08\1\0\0\0\0\0\0\0": "no 4-byte number",
        b"utt0 \0B\4\1\0\0\0\x08\1\0\0\0": "has not 4 bytes",
        b"utt0 1 2 three\n": "something else than whole numbers",
        b"utt0 1 2 99999999999\n": "something else than whole numbers",
        b"RIFF\xff\xff" + bytes(5000): "no name or token",
        b"\xff\xfe 1\n": "should be text",
    }
    for content, reason in contents.items():
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=reason):
            list(read_int_vectors(path))


def test_numbers_that_are_none_of_the_models_are_refused(tmp_path: Path) -> None:
    source = alignment_source(ali_dir(tmp_path / "ali", {"utt0": [1, 2], "utt1": [1, 8]}), None)
    with pytest.raises(ConfigError, match=r"ali\.2\.gz: utterance utt1.*transition-id 8 is not in 1\.\.7"):
        list(source.pdfs())
    pdfs = write_alignments(tmp_path / "pdfs.ark", {"utt0": [0, 6]})
    with pytest.raises(ConfigError, match=r"pdf 6 is not in 0\.\.5"):
        list(alignment_source(tmp_path / "ali", pdfs).pdfs())
    ((_, values),) = alignment_source(None, pdfs).pdfs()
    assert values.tolist() == [0, 6]


def test_an_alignment_given_twice_and_one_that_is_missing_are_refused(tmp_path: Path) -> None:
    folder = ali_dir(tmp_path / "ali", {"utt0": [2], "utt1": [2]})
    write_alignments(folder / "ali.2.gz", {"utt0": [2]})
    with pytest.raises(ConfigError, match=r"utt0 has an alignment already; remove one of the two"):
        list(alignment_source(folder, None).pdfs())
    write_alignments(folder / "ali.3.gz", {"utt0": [2]})  # of an earlier alignment by more jobs
    write_alignments(folder / "ali.2.gz", {"utt1": [2]})
    source = alignment_source(folder, None)
    assert [name for name, _ in source.pdfs()] == ["utt0", "utt1"]
    assert source.notices == (f"{folder}: not read, as num_jobs says 2: ali.3.gz",)
    (folder / "ali.3.gz").unlink()
    (folder / "ali.2.gz").unlink()
    with pytest.raises(ConfigError, match=r"ali\.2\.gz: is missing, num_jobs says 2"):
        alignment_source(folder, None)
    write_alignments(folder / "ali.3.gz", {"utt2": [2]})
    (folder / "num_jobs").unlink()  # the gap shows it as well
    with pytest.raises(ConfigError, match=r"ali\.2\.gz: is missing, the last one there is 3; copy it too"):
        alignment_source(folder, None)
    (folder / "ali.3.gz").unlink()
    (folder / "ali.1.gz").unlink()
    with pytest.raises(ConfigError, match=r"has no ali\.1\.gz"):
        alignment_source(folder, None)


@pytest.mark.parametrize(
    ("alignment", "fault"),
    [
        ([2, 1, 1, 4, 3, 7, 6], None),  # self-loops last, as Kaldi's graphs have them by default
        ([1, 1, 2, 3, 4, 6, 7], None),  # self-loops first
        ([2, 5, 2], None),
        ([2, 7, 5], 1),  # the second state of a phone without its first
        ([4, 2], 1),  # a phone that is not gone through
        ([7], 0),
        ([2, 4], 1),  # ends in the midst of a phone
        ([2, 3, 2], 1),  # a self-loop of a state that is not there
        ([1, 2, 3, 5, 3], 4),  # self-loops first, and once last
        ([1, 1], 0),
    ],
)
def test_paths_of_a_model(tmp_path: Path, alignment: list[int], fault: int | None) -> None:
    (tmp_path / "final.mdl").write_bytes(binary_model(tuples=True))
    pdf_map = read_pdf_map(tmp_path / "final.mdl")
    assert pdf_map.first_fault(np.array(alignment, np.int32)) == fault


def test_made_up_paths_are_paths_and_hardly_anything_else_is(tmp_path: Path) -> None:
    (tmp_path / "final.mdl").write_bytes(binary_model(tuples=False))
    pdf_map = read_pdf_map(tmp_path / "final.mdl")
    for length in range(1, 60):
        path = some_path(length, seed=length)
        assert len(path) == length and pdf_map.first_fault(np.array(path, np.int32)) is None
    rng = np.random.default_rng(1)
    assert all(pdf_map.first_fault(rng.integers(1, 8, 50)) is not None for _ in range(200))


def test_an_alignment_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    folder = ali_dir(tmp_path / "ali", {"utt0": [1, 2], "utt1": [4, 3, 3]})
    with pytest.raises(ConfigError) as caught:
        list(alignment_source(folder, None).pdfs())
    assert str(caught.value) == (
        f"{folder / 'ali.2.gz'}: utterance utt1: the alignment is not a path through {folder / 'final.mdl'} "
        "(transition-id 3 of frame 2); give the model it was made with"
    )


def test_a_model_that_is_a_link_to_nowhere_is_named(tmp_path: Path) -> None:
    folder = ali_dir(tmp_path / "ali", {"utt0": [2]})
    (folder / "final.mdl").unlink()
    (folder / "final.mdl").symlink_to("35.mdl")
    with pytest.raises(ConfigError) as caught:
        alignment_source(folder, None)
    assert str(caught.value) == (
        f"{folder / 'final.mdl'}: is a symbolic link to 35.mdl, which does not exist; "
        "copy the model itself (cp -L)"
    )
    for name in ("5.mdl", "40.mdl"):
        (folder / name).write_bytes(binary_model(tuples=True))
    with pytest.raises(ConfigError, match=rf"does not exist; ln -sf 40\.mdl {folder / 'final.mdl'}$"):
        alignment_source(folder, None)
    (folder / "ali.1.gz").unlink()
    (folder / "ali.1.gz").symlink_to("gone.gz")
    (folder / "final.mdl").unlink()
    (folder / "final.mdl").symlink_to("40.mdl")
    with pytest.raises(ConfigError, match=r"ali\.1\.gz: cannot be read \(it is a symbolic link to gone\.gz"):
        list(alignment_source(folder, None).pdfs())
