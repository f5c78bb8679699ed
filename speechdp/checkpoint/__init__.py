"""Checkpoints: what is in one, how ranks write it during training, how it is read back."""
