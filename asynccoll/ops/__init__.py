"""What users call, in all its forms: now, prepared, coalesced, compiled, explained.

Finds the lane, and hands what was passed to ``payload`` (a prepared or coalesced call to ``tensors``); must
not know which backend it runs on.
"""
