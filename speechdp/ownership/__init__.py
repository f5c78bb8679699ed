"""One job per folder: who owns it, whether that job is gone, and overwriting a folder."""
