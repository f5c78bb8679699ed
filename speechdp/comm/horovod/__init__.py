"""Ranks over Horovod, which exchanges in its background thread, over MPI or Gloo."""
