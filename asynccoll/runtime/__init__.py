"""How a process joins and leaves: ``initialize``, ``finalize``, and which context a call runs in.

Asks the table of backends for a world; must not know how one is made, nor what is sent there.
"""

from asynccoll.runtime.process import current, finalize, initialize, is_initialized, new_group

__all__ = ["current", "finalize", "initialize", "is_initialized", "new_group"]
