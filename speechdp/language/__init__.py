"""Language models: n-grams estimated from transcripts, ARPA files, perplexities."""
