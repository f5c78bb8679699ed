"""The acoustic model and the Tacotron."""
