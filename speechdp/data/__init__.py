"""From audio and archives to batches; one room for each stage."""
