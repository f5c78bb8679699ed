"""The errors speechdp raises on purpose.

Every message is one line that names the file (or option), the rank where it matters, and the remedy:
the command line prints it as it is and exits non-zero on every rank.
"""

from typing import ClassVar

from speechdp import exit_codes


def printable(text: str) -> str:
    """Return text without line breaks and control characters, whatever file contents are in it."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def one_line(error: object, longest: int | None = None) -> str:
    """Return the text of a foreign error without line breaks, for use in one of our messages.

    Args:
        longest: number of characters to keep; None: all.

    Example:
        >>> one_line(ValueError("no such\n  entry"))
        'no such entry'
    """
    return " ".join(str(error).split())[:longest]


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error means that this computer is short of memory."""
    # Rust (safetensors) and torch's allocator have no exception class for it.
    return isinstance(error, MemoryError) or "allocate memory" in str(error)


class SpeechDPError(Exception):
    """Base of all errors that the user can fix; never raised itself.

    Attributes:
        exit_code: exit code of a command that ends with this error.
    """

    exit_code: ClassVar[int] = exit_codes.FAILED

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(SpeechDPError):
    """An option, a corpus, a lexicon, a hostfile or a transcript that cannot be used."""


class UsageError(ConfigError):
    """A command line that the command cannot read: words are missing, empty, too many or unknown."""

    exit_code = exit_codes.USAGE


class UnreadableAudioError(ConfigError):
    """An audio file that is damaged, or a file that is not audio.

    Attributes:
        fault: the message without its remedy.
    """

    def __init__(self, message: str, fault: str = "") -> None:
        super().__init__(message)
        self.fault = fault or message


class OutsideRecordingError(ConfigError):
    """An utterance that does not lie within its recording, or that has no samples.

    Attributes:
        fault: the message without its remedy.
    """

    def __init__(self, fault: str) -> None:
        super().__init__(f"{fault}; correct the times in segments, or leave the utterance out")
        self.fault = fault


class SeveralChannelsError(ConfigError):
    """An audio file with several channels, of which only one can be read.

    Attributes:
        fault: the message without its remedy.
    """

    REMEDY: ClassVar[str] = "add --channel 1 for the first, or another, or --channel mix for the mean of all"

    def __init__(self, fault: str) -> None:
        super().__init__(f"{fault}; {self.REMEDY}")
        self.fault = fault


class FolderInUseError(ConfigError):
    """A folder that belongs to another job."""

    exit_code = exit_codes.IN_USE


class ShardError(SpeechDPError):
    """An HDF5 shard or data directory that is damaged, truncated or of another layout version."""


class CommunicationError(SpeechDPError):
    """Ranks that disagree about the world, or an exchange between them that failed."""


class RunError(SpeechDPError):
    """A run that cannot continue or be resumed: NaN in the loss, a full disk, a damaged checkpoint."""


class DivergedError(RunError):
    """A training whose loss or parameters are not finite, because of its options or the data."""
