"""torch_xla, where replicas may be threads, and a collective is part of a graph."""
