"""Horovod: its controller, its fusion, its process sets."""
