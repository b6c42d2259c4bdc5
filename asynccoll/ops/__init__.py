"""The operations that users call, in all their forms: immediate, prepared, coalesced, compiled, explained.

This package looks up the lane and passes the arguments to ``payload`` (those of a prepared or coalesced call
to ``tensors``). It must not know which backend a call runs on.
"""
