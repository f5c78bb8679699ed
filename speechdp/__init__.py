"""Data-parallel training of speech models over N ranks, with a choice of averaging strategy and period."""

__version__ = "0.1.0"
