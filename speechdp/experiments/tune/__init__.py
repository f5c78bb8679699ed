"""Find the strategy, averaging period, back-end and batch that reach a held-out value soonest."""
