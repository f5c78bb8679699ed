"""Profile of one training step, function by function, over numbers of ranks: `speechdp profile`."""
