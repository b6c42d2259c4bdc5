"""torch's modes (grad, inference, autocast, default device) as values: taken at a call, kept by task.

Must not know what is called in them.
"""
