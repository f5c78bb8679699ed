"""Code shared by subcommands."""
