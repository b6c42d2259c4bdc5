"""What users call, in all its forms: now, prepared, coalesced, compiled, explained.

Checks arguments, finds the lane, and hands what was passed to ``payload``; knows no backend.
"""
