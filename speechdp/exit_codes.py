"""Exit codes of speechdp's commands; docs/clusters.md has the table."""

from __future__ import annotations

#: A rank failed, or refused what it was asked for; its message stands above.
FAILED = 1
#: An option nobody knows (what argument parsers return).
USAGE = 2
#: The run was asked to stop and saved a checkpoint: not success (there is no model yet), and told apart
#: from failure by schedulers that requeue on it (EX_TEMPFAIL of sysexits.h).
STOPPED = 75
#: No step ended for --hang-timeout (what timeout(1) returns).
HUNG = 124
