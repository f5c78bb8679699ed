"""One strategy a file, under the name it has on the command line; nothing else."""
