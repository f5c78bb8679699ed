"""The race: all settings of an experiment in turn, within one start of the ranks, so that speeds compare."""
