"""How a process joins and leaves: ``initialize``, ``finalize``, and which context a call runs in.

It gets a world from the table of backends; it must not know how a world is made, nor what is sent in it.
"""

from asynccoll.runtime.process import current, finalize, initialize, is_initialized, new_group

__all__ = ["current", "finalize", "initialize", "is_initialized", "new_group"]
