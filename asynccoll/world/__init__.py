"""This rank's place: its context, its groups with their lanes, and how a process joins and leaves.

Builds everything below it; must not know what is sent.
"""
