"""torch_xla: replicas are threads, and what is sent is a part of a graph."""
