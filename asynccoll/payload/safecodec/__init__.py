"""The default codec's format: plain data as bytes, and back without running anybody's code.

A value is a tag and what it is made of, all of it decoded before the value is built. There is nothing in the
format that acts on a value that exists already: no call, no attribute, no item is set by a message, and a
class that it names is given its fields and nothing else. Every length is checked against the bytes that are
left before memory is taken. (Pickle with a short list of types, which this replaces, had each of these.)
msgspec and msgpack are quicker, but have no tuples, sets, enums or shared references of their own, so that a
walk through the object would be needed on both sides all the same.
"""

from asynccoll.payload.safecodec.decoder import decode
from asynccoll.payload.safecodec.encoder import encode

__all__ = ["decode", "encode"]
