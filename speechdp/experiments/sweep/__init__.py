"""`speechdp sweep`: the same training with each averaging period, over ranks or as jobs of a script."""
