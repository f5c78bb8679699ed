"""Starting ranks by the mpirun of an MPI: what is started, and what each kind of mpirun is told."""
