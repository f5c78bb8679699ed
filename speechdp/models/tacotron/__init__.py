"""Tacotron: text to spectrograms, in three separately profiled parts: encoder, decoder, postproc."""
