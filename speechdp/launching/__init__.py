"""Starting jobs: hostfiles, allocations, command lines, job scripts, supervision, restarts."""
