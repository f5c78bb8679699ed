"""Checkpoints: their contents, how ranks write them during training, and how they are read back."""
