"""Who started this process, and where it is in its job: pure functions of a mapping of variables.

Starts nothing, and knows no collectives.
"""
