"""Which tensors may be sent and filled, which share memory, and what an earlier call still fills.

Knows tensors, not what is done with them.
"""
