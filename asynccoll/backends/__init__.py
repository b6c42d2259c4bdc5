"""Which backends there are, a folder each, and the table of them.

What one has to provide stands in ``asynccoll.backends.api``; none of them imports what is above ``world``.
"""
