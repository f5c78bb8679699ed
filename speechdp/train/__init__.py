"""The trainer of the product: one run from options to a finished model."""
