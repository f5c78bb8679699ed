"""Start ranks with the mpirun of an MPI: what to start, and options and settings of each kind of mpirun."""
