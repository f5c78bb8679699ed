"""What is computed between reading and training: features, augmentation, inputs of the model."""
