"""What a training would take on another cluster, predicted from the steps of finished runs; time only."""
