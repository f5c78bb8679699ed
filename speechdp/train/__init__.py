"""The trainer of `speechdp train`: one run from options to a finished model."""
