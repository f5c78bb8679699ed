"""From posteriors to words: graphs, search, forced alignment, word error rate."""
