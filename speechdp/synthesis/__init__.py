"""Text to sound with a trained model, and how good it is."""
