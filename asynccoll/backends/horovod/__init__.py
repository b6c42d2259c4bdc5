"""Horovod, with its controller, its fusion and its process sets."""
