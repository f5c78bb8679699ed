"""Corpora before any audio is read: utterances, transcripts, splits."""
