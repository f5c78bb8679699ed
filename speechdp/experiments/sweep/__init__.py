"""`speechdp sweep`: the same training with every averaging period, over ranks or as jobs of a script."""
