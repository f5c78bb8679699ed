"""Checkpoints: what is in one, how ranks write it behind training, how it is read back."""
