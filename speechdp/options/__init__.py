"""The options of a training run: frozen dataclasses, one a component, checked together before step 1."""
