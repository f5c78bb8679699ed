"""Environment variables by which `speechdp launch` and experiments tell ranks and scripts what they know."""

from __future__ import annotations

#: Names a script's folder in place of the script.
FOLDER = "SPEECHDP_FOLDER"
#: `1` tells a user's script that it is started again: a run in its folder that is unfinished, or of an
#: earlier start of the job, is gone on with, or begun anew where the script has loaded no state, instead of
#: refused.
RESUME = "SPEECHDP_RESUME"
#: Where a script is told to stop, to be continued later: `STEP`, or `evaluation:STEP`; or is cut: `cut:STEP`.
PAUSE = "SPEECHDP_PAUSE_AT"
#: Where the hosts stood, the hosts themselves, and the command line of launch, a JSON list.
HOSTFILE, HOSTS, LAUNCH = "SPEECHDP_HOSTFILE", "SPEECHDP_HOSTS", "SPEECHDP_LAUNCH"
#: Why launch starts a job again; not set at its first start.
RESTART_REASON = "SPEECHDP_RESTART_REASON"
#: `COLUMNSxLINES` of the terminal that launch writes to; empty: to none.
TERMINAL = "SPEECHDP_TERMINAL"
