"""The backends, one folder each, and the table that lists them.

``asynccoll.backends.api`` says what a backend has to provide. No backend imports a layer above ``world``.
"""
