"""Ranks over torch.distributed: gloo on CPUs, NCCL on GPUs."""
