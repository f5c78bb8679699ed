"""`speechdp profile`: staged steps over numbers of ranks, and their record."""
