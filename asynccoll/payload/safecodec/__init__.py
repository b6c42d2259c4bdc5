"""The default codec's format: plain data as bytes, and back without running user code.

A value is a tag and the value's parts, which are decoded before the value is built. Nothing in the format
acts on a value that exists already: a message cannot call anything or set an attribute or an item, and an
object of a class that it names gets its fields and nothing else. Every length is checked against the bytes
that are left before memory is allocated. (Pickle restricted to a short list of types, which this replaces,
had each of these weaknesses.) msgspec and msgpack are faster, but lack tuples, sets, enums and shared
references, so both sides would have to walk through the object anyway.
"""

from asynccoll.payload.safecodec.decoder import decode
from asynccoll.payload.safecodec.encoder import encode

__all__ = ["decode", "encode"]
