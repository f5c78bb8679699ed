"""Ranks that make batches for others."""
