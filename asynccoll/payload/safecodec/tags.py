"""The first byte of each value, and the limits that both sides keep to."""

from __future__ import annotations

#: How deep containers may be nested: both sides go through them by recursion.
MAX_DEPTH = 300
#: The size that says that eight bytes with the real one follow.
LONG = 255
#: Longer runs of one type go as a block, which is quicker than JSON; so does what would be longer than this.
JSON_RUN, JSON_LENGTH = 32, 1 << 20
#: Longer texts and bytes are sent once, however often they occur.
SHARED_LENGTH = 64
#: Shorter runs of one type are not worth a batch.
MIN_RUN = 4

NONE, TRUE, FALSE, INT, FLOAT, TEXT, BYTES, AGAIN = range(8)
LIST, TUPLE, DICT, SET, FROZENSET, BYTEARRAY, ORDERED, COUNTER, DEQUE = range(8, 17)
TENSOR, ARRAY, SCALAR, ENUM, DATACLASS, NAMEDTUPLE, PARTS, JSON = range(17, 25)
NAMESPACE, DEFAULTDICT = range(25, 27)

#: How the members of a container follow: one by one with their tags, or all of one type.
MIXED, FLOATS, INTS, TEXTS, BOOLS = range(5)
#: How the keys of a dict follow: texts, the texts of an earlier dict, anything.
NEW_KEYS, SAME_KEYS, ANY_KEYS = range(3)
