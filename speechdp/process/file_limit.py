"""How many files a process may have open at a time (ulimit -n)."""

from __future__ import annotations

import resource
from pathlib import Path

from speechdp.errors import ConfigError

#: Least number of files for a launcher and the ranks of a host: with fewer, Open MPI waits for ever for ranks
#: that it could not start.  2 ranks need 29, 8 need 41 and 16 need 57 before MPI is initialised.
_LEAST_OF_LAUNCHER = 64
#: Limit that a launcher sets, not the largest the system allows: Open MPI closes every descriptor up to the
#: limit for each rank that it starts, which takes minutes with a limit of a thousand million.
_OF_LAUNCHER = 4096


def files_left() -> int | None:
    """Return how many more files this process may open now; None: without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        already = sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError:  # not even one, to look
        return 0
    return max(0, limit - already)


def raise_file_limit() -> None:
    """Let this rank open as many files as the system allows: every shard in use is an open file."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def raise_file_limit_of_launcher() -> None:
    """Let this process, and the launcher and ranks that it starts, open enough files.

    Raises:
        ConfigError: the system allows fewer files than these need.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if limit != unlimited and limit < _OF_LAUNCHER:
        limit = _OF_LAUNCHER if most == unlimited else min(_OF_LAUNCHER, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    if limit != unlimited and limit < _LEAST_OF_LAUNCHER:
        raise ConfigError(
            f"{limit} files may be open at a time here, and mpirun with its ranks needs {_LEAST_OF_LAUNCHER} "
            "or more: raise the limit (ulimit -Hn as root, or /etc/security/limits.conf)"
        )
