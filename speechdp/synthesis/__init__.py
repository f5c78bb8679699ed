"""Speech from text with a trained model, and how good it is."""
