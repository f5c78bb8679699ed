"""Read the bytes of Kaldi's files, plain or gzip; errors name file, utterance and byte."""

from __future__ import annotations

import io
import os
import struct
import zlib
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from speechdp.errors import ConfigError

_GZIP_MAGIC = b"\x1f\x8b"
#: Read this many bytes at a time, so that a wrong length costs no memory.
_PIECE_BYTES = 1 << 20
_PACKED_BYTES = 1 << 16
_MAX_WORD_BYTES = 4096
_MAX_LINE_BYTES = 1 << 26
_SPACE = b" \t\n\r"


class KaldiStream:
    """A Kaldi file, read from a given byte on; positions in a gzip file count uncompressed bytes.

    Attributes:
        path: the file.
        position: number of bytes before the next one.
        utterance: current utterance, named in errors; "": not known yet.
        line_is_over: whether the white space after the last word was the end of its line.

    Raises:
        ConfigError: the file cannot be opened, or `offset` lies past its end.
    """

    def __init__(self, path: Path, offset: int = 0, utterance: str = "") -> None:
        self.path = path
        self.position = offset
        self.utterance = utterance
        self.line_is_over = False
        self._stack = ExitStack()
        try:
            raw = self._stack.enter_context(path.open("rb"))
            magic = raw.read(2)
            raw.seek(offset)
            size = os.fstat(raw.fileno()).st_size
        except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
            self._stack.close()
            reason = getattr(error, "strerror", None) or error
            if isinstance(error, FileNotFoundError) and path.is_symlink():
                reason = f"it is a symbolic link to {path.readlink()}, which does not exist"
            raise ConfigError(f"{path}: cannot be read ({reason}); check the path") from error
        self._size: int | None = None if magic == _GZIP_MAGIC else size
        if self._size is not None and offset >= max(size, 1):
            self._stack.close()
            raise self.failure(f"the file ends at byte {size}")
        stream: BinaryIO = raw
        if self._size is None:
            stream = self._stack.enter_context(io.BufferedReader(_Unpacked(raw)))
        self._stream = stream

    def failure(self, reason: str) -> ConfigError:
        """Return the error for a fault at the current byte."""
        where = f"utterance {self.utterance}, " if self.utterance else ""
        return ConfigError(
            f"{self.path}: {where}byte {self.position}: {reason}; copy the file again or make it again"
        )

    def peek(self, num: int) -> bytes:
        """Return the next `num` bytes, fewer at the end, without consuming them."""
        try:
            return bytes(self._stream.peek(num)[:num])  # type: ignore[attr-defined]
        except (OSError, EOFError, zlib.error) as error:
            raise self.failure(f"the file is truncated or damaged ({error})") from error

    def expect(self, num: int, what: str) -> None:
        """Refuse a file that ends before `num` more bytes, as far as its size shows.  Raises ConfigError."""
        if num < 0 or (self._size is not None and num > self._size - self.position):
            raise self.failure(f"{what} should have {num} bytes, and the file ends before")

    def skip(self, num: int, what: str) -> None:
        """Skip `num` bytes of `what`.  Raises ConfigError if the file has fewer."""
        self.expect(num, what)
        if self._size is None:  # a compressed file cannot be skipped without reading
            while num:
                num -= len(self.take(min(num, _PIECE_BYTES), what))
            return
        try:
            self._stream.seek(num, os.SEEK_CUR)
        except OSError as error:
            raise self.failure(f"the file is truncated or damaged ({error})") from error
        self.position += num

    def take(self, num: int, what: str) -> bytes:
        """Read exactly `num` bytes of `what`.  Raises ConfigError if the file has fewer."""
        self.expect(num, what)
        pieces: list[bytes] = []
        missing = num
        while missing:
            piece = self._read(min(missing, _PIECE_BYTES))
            if not piece:
                raise self.failure(f"{what} should have {num} bytes, and the file ends before")
            pieces.append(piece)
            missing -= len(piece)
            self.position += len(piece)
        return b"".join(pieces)

    def line(self) -> str:
        """Read the rest of a line, which must end with a newline."""
        try:
            text = self._stream.readline(_MAX_LINE_BYTES)
        except (OSError, EOFError, zlib.error) as error:
            raise self.failure(f"the file is truncated or damaged ({error})") from error
        if not text.endswith(b"\n"):
            raise self.failure("the line has no end, the file is truncated or no text")
        self.position += len(text)
        return self._decoded(text)

    def word(self) -> str:
        """Read a word and the single white space after it; "" at the end of the file.

        Leading white space is skipped, as by Kaldi in text.
        """
        word = b""
        while byte := self._read(1):
            self.position += 1
            if byte not in _SPACE:
                word += byte
            elif word:
                self.line_is_over = byte == b"\n"
                return self._decoded(word)
            if len(word) > _MAX_WORD_BYTES:
                break
        if word:
            raise self.failure("there is no name or token of Kaldi's here, or the file is truncated")
        return ""

    def int32(self, what: str) -> int:
        """Read a bare little-endian int32."""
        (value,) = struct.unpack("<i", self.take(4, what))
        return int(value)

    def sized_int32(self, what: str) -> int:
        """Read an int32 as written by Kaldi's WriteBasicType: a byte 4, then the value."""
        if self.take(1, what) != b"\4":
            raise self.failure(f"{what} is no 4-byte number")
        return self.int32(what)

    def int32_vector(self, what: str) -> npt.NDArray[np.int32]:
        """Read a vector as written by Kaldi's WriteIntegerVector: a byte 4, the length, the values."""
        if self.take(1, what) != b"\4":
            raise self.failure(f"{what} is no vector of 4-byte numbers")
        length = self.int32(what)
        if length < 0:
            raise self.failure(f"{what} has {length} numbers")
        return np.frombuffer(self.take(4 * length, what), dtype="<i4").astype(np.int32)

    def is_binary(self) -> bool:
        """Return whether Kaldi's mark of binary data is next; consume it if so."""
        if self.peek(2) != b"\0B":
            return False
        self.take(2, "the mark of binary data")
        return True

    def __enter__(self) -> KaldiStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _read(self, num: int) -> bytes:
        try:
            return self._stream.read(num)
        except (OSError, EOFError, zlib.error) as error:
            raise self.failure(f"the file is truncated or damaged ({error})") from error

    def _decoded(self, text: bytes) -> str:
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.failure("here should be text, and there is none") from error


class _Unpacked(io.RawIOBase):
    """The uncompressed bytes of consecutive gzip members.

    Unlike gzip.GzipFile it returns all bytes before the point where a file is truncated, so that errors name
    the utterance there.
    """

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._packed = b""
        self._member: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._member is None and not self._begin_member():
                return 0
            data = self._member.decompress(self._packed, len(buffer))
            self._packed = self._member.unconsumed_tail
            if self._member.eof:
                self._packed, self._member = self._member.unused_data, None
            if data:
                buffer[: len(data)] = data
                return len(data)
            if self._member is not None and not self._fill():
                raise EOFError("its gzip stream does not end")

    def _begin_member(self) -> bool:
        self._packed = self._packed.lstrip(b"\0")  # padding, which gzip also skips
        while not self._packed and self._fill():
            self._packed = self._packed.lstrip(b"\0")
        if self._packed:
            self._member = zlib.decompressobj(zlib.MAX_WBITS | 16)
        return bool(self._packed)

    def _fill(self) -> bool:
        self._packed = self._raw.read(_PACKED_BYTES)
        return bool(self._packed)
