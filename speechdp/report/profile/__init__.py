"""What the page of a profile shows and says."""
