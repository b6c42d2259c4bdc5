"""What backends share that meet by a store of their own: where it is served, which GPU a rank uses.

Knows none of them.
"""
