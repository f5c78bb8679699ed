"""From a started process to a rank of a job: choosing a back-end, the world check, failure, who feeds."""
