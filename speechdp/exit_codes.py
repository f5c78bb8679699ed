"""Exit codes of speechdp's commands; docs/clusters.md has the table."""

from __future__ import annotations

#: A rank refused what it was asked for, or the data it was given; the same would happen again.
FAILED = 1
#: A command line that cannot be read: an unknown command or option, or words that are missing, empty or too
#: many (what argument parsers return).
USAGE = 2
#: Something unexpected, or a peer that was lost: another start may help (EX_SOFTWARE of sysexits.h).
CRASHED = 70
#: The folder belongs to another job that lives, or has taken it over: another start would only be refused, or
#: disturb it (EX_CANTCREAT of sysexits.h).
IN_USE = 73
#: The run was asked to stop and saved a checkpoint: not success (there is no model yet), and told apart
#: from failure by schedulers that requeue on it (EX_TEMPFAIL of sysexits.h).
STOPPED = 75
#: A user's script was asked to stop and has saved nothing: another start would only do the same work again
#: (the next free one of sysexits.h).
STOPPED_UNSAVED = 76
#: No step ended for --hang-timeout, or a script's rank waited so long for others (what timeout(1) returns).
HUNG = 124
