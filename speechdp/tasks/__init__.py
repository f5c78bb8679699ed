"""What a model is trained for: loss, evaluation, which batches."""
