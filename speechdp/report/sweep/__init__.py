"""What the report of a run or a sweep shows and says."""
