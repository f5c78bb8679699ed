"""Tables, pictures and pages, from files alone."""
