"""Environment variables by which `speechdp launch` and experiments pass information to ranks and scripts."""

from __future__ import annotations

#: Overrides a script's own choice of its folder.
FOLDER = "SPEECHDP_FOLDER"
#: `1` tells a user's script that it is started again.  Then a run in its folder that is unfinished, or of an
#: earlier start of the job, is not refused but resumed, or started over if the script has loaded no state.
RESUME = "SPEECHDP_RESUME"
#: Where a script must stop, to be continued later: `STEP` or `evaluation:STEP`; or where it is cut:
#: `cut:STEP`.
PAUSE = "SPEECHDP_PAUSE_AT"
#: Source of the hosts, the hosts themselves, and the command line of launch, a JSON list.
HOSTFILE, HOSTS, LAUNCH = "SPEECHDP_HOSTFILE", "SPEECHDP_HOSTS", "SPEECHDP_LAUNCH"
#: Why launch restarts a job; not set at its first start.
RESTART_REASON = "SPEECHDP_RESTART_REASON"
#: `COLUMNSxLINES` of the terminal that launch writes to; empty: no terminal.
TERMINAL = "SPEECHDP_TERMINAL"
