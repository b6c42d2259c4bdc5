"""Collectives between ranks of one host through memory that they share: no sockets, no copies by the kernel.

Chosen for tensors on the CPU wherever all ranks of a group have proved that they share memory, whatever
backend carries the rest. ``protocol`` holds what ranks read and write in each other's sight; must not know
lanes or plans.
"""
