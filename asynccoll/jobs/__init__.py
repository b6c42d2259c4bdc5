"""Running jobs, seen from outside: which there are, where their ranks stand, and what they do.

For ``asynccoll where`` and ``asynccoll top``. Reads flight recorders and asks ranks; must not know what runs
in this process, nor load torch.
"""
