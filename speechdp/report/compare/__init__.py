"""What the page of a comparison shows and says."""
