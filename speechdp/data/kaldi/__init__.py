"""Reading and writing Kaldi's files."""
