"""Ranks over MPI by mpi4py, whose import initialises MPI."""
