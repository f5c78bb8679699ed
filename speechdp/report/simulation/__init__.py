"""The page of a simulation: predicted speeds, efficiencies and costs, as a table, plots and CSV."""
