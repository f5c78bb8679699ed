"""Exit codes of speechdp's commands; docs/clusters.md has the table."""

from __future__ import annotations

#: A rank refused the request or the data; the same would happen again.
FAILED = 1
#: A command line that cannot be read: an unknown command or option, or words that are missing, empty or too
#: many (what argument parsers return).
USAGE = 2
#: An unexpected error, or a lost peer: another start may help (EX_SOFTWARE of sysexits.h).
CRASHED = 70
#: The folder belongs to another live job, or was taken over by one: another start would only be refused, or
#: disturb that job (EX_CANTCREAT of sysexits.h).
IN_USE = 73
#: The run stopped as requested and saved a checkpoint.  This is no success, as there is no model yet;
#: schedulers that requeue on it can distinguish it from failure (EX_TEMPFAIL of sysexits.h).
STOPPED = 75
#: A user's script stopped as requested without saving: another start would only repeat the same work (the
#: next free code of sysexits.h).
STOPPED_UNSAVED = 76
#: No step ended for --hang-timeout, or a script's rank waited so long for others (what timeout(1) returns).
HUNG = 124
