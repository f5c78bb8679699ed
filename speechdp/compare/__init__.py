"""Several strategies on the same data: which runs, their jobs, and the page that compares them."""
