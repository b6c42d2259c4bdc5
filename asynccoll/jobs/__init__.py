"""Running jobs, seen from outside: which jobs there are, where their ranks stand, and what they do.

For ``asynccoll where`` and ``asynccoll top``. It reads flight recorders and asks ranks; it must not know what
runs in this process, nor load torch.
"""
