"""From a started process to a rank of a job: back-end choice, world check, failure, feeder roles."""
