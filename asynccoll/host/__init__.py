"""What the system gives: processes, forks, exits, sockets, the store, and who is calling from where.

Knows nothing of collectives: whatever is above is handed to it as a function or a value.
"""
