"""Samples, features and spectrograms."""
