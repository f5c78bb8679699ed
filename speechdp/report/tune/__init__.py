"""The page of a search: what was tried, ruled out and chosen."""
