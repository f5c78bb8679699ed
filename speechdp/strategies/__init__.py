"""One strategy per file, under its name on the command line; nothing else."""
