"""How a process joins and leaves: ``initialize``, ``finalize``, and which context a call runs in.

Puts a world together of whatever it takes; must not know what is sent there.
"""

from asynccoll.runtime.process import current, finalize, initialize, is_initialized, new_group

__all__ = ["current", "finalize", "initialize", "is_initialized", "new_group"]
