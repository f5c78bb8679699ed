"""What a model is trained for: model, loss, metrics, stages for the profile, file of the finished model."""
