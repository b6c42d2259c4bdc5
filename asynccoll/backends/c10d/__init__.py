"""torch's process groups: gloo, nccl, and whatever is registered with torch."""
