"""Every operation of a run made late, and made to fail, in turn."""
