"""Graphs of the word sequences that may be said: built from HMMs, lexicon and grammar, or read from Kaldi."""
