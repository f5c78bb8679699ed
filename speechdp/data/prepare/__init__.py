"""Making data directories: from corpora, Kaldi systems, synthetic speech, or other data directories."""
