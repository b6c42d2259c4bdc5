"""What goes wrong, on which rank: who is lost, who has refused what, who called something else.

Knows lanes and the store; what to do about it is told to it by the world.
"""
