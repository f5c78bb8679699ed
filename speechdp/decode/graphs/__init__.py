"""Graphs of what may be said: made of HMMs, lexicon and grammar, or read as Kaldi wrote them."""
