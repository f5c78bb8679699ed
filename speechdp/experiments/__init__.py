"""Experiments that make many runs to answer one question: sweep, compare, tune, profile."""
