"""What strategies share: buckets, periods, outer optimizers, servers, gossip."""
