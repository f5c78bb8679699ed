"""The page of a decoding: what was recognised wrongly, and where."""
