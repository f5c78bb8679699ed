"""Tacotron: text to spectrograms, in three parts that are profiled apart: encoder, decoder, postproc."""
