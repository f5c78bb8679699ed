"""`speechdp doctor`: look at every node over the launcher itself before a job is trusted to it."""
