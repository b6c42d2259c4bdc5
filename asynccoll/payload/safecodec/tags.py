"""The tags (each value begins with one, a byte), and the limits that encoder and decoder observe."""

from __future__ import annotations

#: How deep containers may be nested: encoder and decoder walk through them by recursion.
MAX_DEPTH = 300
#: A size byte of this value says that the real size follows in eight bytes.
LONG = 255
#: An object with a run of one type longer than ``JSON_RUN`` (faster as a block), or whose JSON text would be
#: longer than ``JSON_LENGTH``, is not written as JSON.
JSON_RUN, JSON_LENGTH = 32, 1 << 20
#: Texts and bytes longer than this are sent once, however often they occur.
SHARED_LENGTH = 64
#: Runs of one type shorter than this are not written as a block.
MIN_RUN = 4

NONE, TRUE, FALSE, INT, FLOAT, TEXT, BYTES, AGAIN = range(8)
LIST, TUPLE, DICT, SET, FROZENSET, BYTEARRAY, ORDERED, COUNTER, DEQUE = range(8, 17)
TENSOR, ARRAY, SCALAR, ENUM, DATACLASS, NAMEDTUPLE, PARTS, JSON = range(17, 25)
NAMESPACE, DEFAULTDICT = range(25, 27)

#: How the members of a container are written: one by one with their tags, or as a block of one type.
MIXED, FLOATS, INTS, TEXTS, BOOLS = range(5)
#: Which keys a dict has: texts, the same texts as an earlier dict, or anything.
NEW_KEYS, SAME_KEYS, ANY_KEYS = range(3)
