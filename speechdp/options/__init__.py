"""The options of a training run: frozen dataclasses, one per component, checked together before step 1."""
