"""Collectives between ranks of one host through memory that they share: no sockets, no copies by the kernel.

They are used for tensors on the CPU if all ranks of a group have proved that they share memory, whichever
backend carries other tensors. ``layout`` says which words and data lie in the shared memory. This package
must not know lanes or plans.
"""
