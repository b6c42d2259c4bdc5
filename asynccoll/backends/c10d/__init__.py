"""torch's process groups: gloo, nccl, and any other backend that is registered with torch."""
