"""Batches in the background: reading, preprocessing, padded memory, copies to the GPU."""
