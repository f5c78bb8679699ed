"""Ranks over MPI by mpi4py: importing it initialises MPI."""
