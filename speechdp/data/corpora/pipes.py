"""Run the commands in Kaldi's tables that replace files (`sph2pipe a.sph |`), without a shell."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from speechdp.errors import ConfigError
from speechdp.process.running import RunningPrograms

#: Name and arguments of each program.
_Commands = tuple[tuple[str, ...], ...]

#: Called with what is being done, how much is done, and how much there is.
_Progress = Callable[[str, int, int], None]

#: Characters that only a shell interprets; within single quotes all of them are plain text.
_OF_A_SHELL = frozenset("<>&;()$`*?[]{}~#!\n")
_OF_A_SHELL_IN_QUOTES = frozenset("$`")
_TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<bar>\|)|'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)"|\\(?P<escaped>.)"""
    r"""|(?P<plain>[^\s|'"\\]+)""",
    re.DOTALL,
)
#: Within double quotes a backslash is an escape only before these.
_KEPT_ESCAPE = re.compile(r"""\\(["\\$`])""")
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_SHOWN = 100


@dataclass(frozen=True)
class Pipe:
    """Programs with their arguments; each reads the output of the one before.

    Attributes:
        where: file and line, for messages.
        commands: name and arguments of each program.
    """

    where: str
    commands: _Commands

    @classmethod
    def parse(cls, text: str, where: str, mapped: Callable[[str], str] = str) -> Pipe:
        """Parse `program argument ... | program argument ... |`.

        Args:
            text: the entry of the table.
            where: file and line, for messages.
            mapped: applied to each word, e.g. to replace the beginning of a path.

        Raises:
            ConfigError: it needs a shell (redirections, variables, patterns), or is no pipe.
        """
        commands = _split(text.strip().removesuffix("|"), where)
        if not all(commands):
            raise ConfigError(f"{where}: {text[:_SHOWN]!r} has a pipe without a program; write PROGRAM ... |")
        return cls(where, tuple(tuple(mapped(word) for word in command) for command in commands))

    @property
    def programs(self) -> tuple[str, ...]:
        """The names of the programs."""
        return tuple(command[0] for command in self.commands)

    def run(self, output: Path, running: RunningPrograms | None = None) -> None:
        """Write the output of the last program to the file `output`.

        Args:
            output: the file.
            running: keeps the programs, so that another thread can kill them.

        Raises:
            ConfigError: a program does not exist or fails, or nothing is written.
            OSError: the file cannot be created.
        """
        running = running or RunningPrograms()
        with output.open("wb") as file, tempfile.TemporaryFile() as errors:
            children: list[subprocess.Popen[bytes]] = []
            try:
                self._start(running, children, file, errors)
                codes = [child.wait() for child in children]
            finally:
                for child in children:
                    running.end(child)
            # A program whose reader has gone ends by SIGPIPE: `head` does that to the one before it.
            for number, (command, code) in enumerate(zip(self.commands, codes, strict=True), 1):
                if code != 0 and not (code == -signal.SIGPIPE and number < len(codes)):
                    raise ConfigError(
                        f"{self.where}: {command[0]} ended with exit code {code}{_last_line(errors)}; run "
                        "the line by hand, from this folder"
                    )
        if output.stat().st_size == 0:
            raise ConfigError(f"{self.where}: {self.programs[-1]} wrote nothing; run the line by hand")

    def _start(
        self,
        running: RunningPrograms,
        children: list[subprocess.Popen[bytes]],
        file: IO[bytes],
        errors: IO[bytes],
    ) -> None:
        source: int | IO[bytes] = subprocess.DEVNULL
        for number, command in enumerate(self.commands, 1):
            target: int | IO[bytes] = file if number == len(self.commands) else subprocess.PIPE
            try:
                child = running.start(command, stdin=source, stdout=target, stderr=errors)
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                raise ConfigError(
                    f"{self.where}: {command[0]} cannot be run ({reason}); install it, or put it on PATH"
                ) from error
            finally:
                if not isinstance(source, int):
                    source.close()  # it is the child's now
            children.append(child)
            source = child.stdout or subprocess.DEVNULL


@dataclass
class PipeRunner:
    """Runs pipes, several at a time and each only once, and keeps their output as files.

    Attributes:
        folder: folder for the files.
        workers: pipes to run at a time; None: one per core.
        progress: called with the number of finished pipes.
        programs: how often each program has been run.
    """

    folder: Path
    workers: int | None
    progress: _Progress
    programs: Counter[str] = field(default_factory=Counter)
    _files: dict[_Commands, Path] = field(default_factory=dict)

    def run(self, pipes: Mapping[str, Pipe]) -> dict[str, Path]:
        """Return the file with the output of each pipe: the same file for the same commands.

        Raises:
            ConfigError: from the first pipe that failed.
            OSError: the folder cannot be written.
        """
        new = {pipe.commands: pipe for pipe in pipes.values() if pipe.commands not in self._files}
        files = {each: self.folder / f"pipe-{len(self._files) + n}" for n, each in enumerate(new)}
        running = RunningPrograms()
        with ThreadPoolExecutor(self.workers or len(os.sched_getaffinity(0))) as threads:
            futures: list[Future[None]] = []
            try:
                futures.extend(threads.submit(pipe.run, files[each], running) for each, pipe in new.items())
                self._await(futures)
            finally:
                for future in futures:
                    future.cancel()
                running.kill_all()  # else leaving the block would wait for programs no longer needed
        for pipe in new.values():
            self.programs.update(pipe.programs)
        self._files |= files
        return {key: self._files[pipe.commands] for key, pipe in pipes.items()}

    def _await(self, futures: Sequence[Future[None]]) -> None:
        for done, future in enumerate(as_completed(futures), 1):
            future.result()  # raises the pipe's exception
            self.progress("running pipes", done, len(futures))

    @property
    def notices(self) -> tuple[str, ...]:
        """Messages for the user: which programs were run."""
        if not self.programs:
            return ()
        named = ", ".join(f"{name} ({count} times)" for name, count in sorted(self.programs.items()))
        return (f"ran the programs of pipes, without a shell: {named}",)


def _split(text: str, where: str) -> list[list[str]]:
    """Split a line into commands at |, and these into words like a shell; refuse what needs a shell."""
    commands: list[list[str]] = [[]]
    word: str | None = None
    position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            raise ConfigError(
                f"{where}: {text[position:][:_SHOWN]!r} has no closing quotation mark; correct the line"
            )
        position = token.end()
        if token["space"] or token["bar"]:
            commands[-1] += [] if word is None else [word]
            word = None
            if token["bar"]:
                commands.append([])
        else:
            word = (word or "") + _unquoted(token, where)
    commands[-1] += [] if word is None else [word]
    return commands


def _unquoted(token: re.Match[str], where: str) -> str:
    """Return the text of a part of a word.  Raises ConfigError on what only a shell interprets."""
    plain, double = token["plain"] or "", token["double"] or ""
    special = _OF_A_SHELL.intersection(plain) | _OF_A_SHELL_IN_QUOTES.intersection(_ESCAPED.sub("", double))
    if special:
        raise ConfigError(
            f"{where}: {min(special)!r} needs a shell, and pipes are run without one; write the output to a "
            "file, and name that file here"
        )
    return plain + _KEPT_ESCAPE.sub(r"\1", double) + (token["single"] or token["escaped"] or "")


def _last_line(errors: IO[bytes]) -> str:
    """Return the last line that a program has written to its standard error, for a message."""
    errors.seek(0, os.SEEK_END)
    errors.seek(max(0, errors.tell() - 4096))
    lines = errors.read().decode("utf-8", errors="replace").split("\n")
    shown = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f" ({''.join(c if c.isprintable() else ' ' for c in shown)[:200]})" if shown else ""
