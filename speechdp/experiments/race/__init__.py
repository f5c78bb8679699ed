"""The race: all settings of an experiment take turns in one start of the ranks, to compare their speeds."""
