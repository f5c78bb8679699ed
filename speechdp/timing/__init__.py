"""Measuring only: the spans of every step on every rank, samples of the machine, gathering to rank 0."""
