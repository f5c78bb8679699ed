"""The folder that a command writes: what may be in it, and that no other command writes it meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from speechdp.options.run import TrainOptions
    from speechdp.ownership.overwrite import FolderKind
    from speechdp.ownership.owner import FolderOwner
    from speechdp.train.session import Session


@dataclass(frozen=True)
class OutFolder:
    """The folder that a command writes.

    Attributes:
        overwrite: delete its contents first.
        read: paths that the command reads, as in `check_overwrite`.
    """

    path: Path
    overwrite: bool = False
    read: Mapping[str, Path | None] = field(default_factory=dict)

    def check(self, kind: FolderKind) -> None:
        """Refuse a folder of another command, or one that must not be overwritten, before any work.

        Args:
            kind: kind of folder that the command writes.

        Raises:
            ConfigError: it holds something else or the input, or this user may not delete it.
        """
        from speechdp.ownership.overwrite import check_kind, check_overwrite  # noqa: PLC0415 - fast --help

        if self.overwrite:
            check_overwrite(self.path, kind, self.read)
        else:
            check_kind(self.path, kind)

    def take(self, owner: FolderOwner, kind: FolderKind) -> str:
        """Start writing in a folder that this process owns: check its contents again, and empty it if asked.

        Another command may have owned it and written to it since `check`.

        Returns:
            A line that names what stays in it; "" if there is nothing.

        Raises:
            ConfigError: another command has written to it, or a folder in it is in use.
            RunError: something cannot be deleted.
        """
        from speechdp.ownership.overwrite import check_kind, empty  # noqa: PLC0415 - fast --help

        check_kind(self.path, kind)
        return empty(owner, kind) if self.overwrite else ""


def inputs_of(data: Path, options: TrainOptions) -> dict[str, Path | None]:
    """Return the paths that a training reads, by option; --overwrite must not delete them."""
    return {"DATA": data, "--initial-model": options.initial_model, "--alignments": options.alignments}


@contextmanager
def owned_by_ranks(session: Session, out: OutFolder, command: str, kind: FolderKind) -> Iterator[None]:
    """Own a folder for all ranks during the block, and empty it first if asked.  Collective.

    Args:
        session: the ranks.
        command: the user's command, for messages.
        kind: kind of folder that the command writes.

    Raises:
        As `owned` and OutFolder.take.
    """
    from speechdp.train.ownership import owned  # noqa: PLC0415 - fast --help

    with owned(session, out.path, command) as owner:
        if owner is not None and (stays := out.take(owner, kind)):
            session.reporter.notice(stays)
        session.comm.barrier()
        yield


@contextmanager
def owned_folder(
    out: OutFolder, command: str, print_line: Callable[[str], None], kind: FolderKind
) -> Iterator[FolderOwner]:
    """Own a folder during the block, and empty it first if asked; yield its owner.

    Args:
        command: the user's command, for messages.
        print_line: prints a line of progress.
        kind: kind of folder that the command writes.

    Raises:
        ConfigError: as in OutFolder.check.
    """
    from speechdp.comm.startup.folder_owner import owner_of  # noqa: PLC0415
    from speechdp.process.ending import heed_put_off  # noqa: PLC0415

    heed_put_off()
    out.check(kind)
    with owner_of(out.path, command, print_line) as owner:
        if stays := out.take(owner, kind):
            print_line(stays)
        yield owner
