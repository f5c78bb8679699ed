"""Ranks over Horovod, by its background thread, over MPI or Gloo."""
