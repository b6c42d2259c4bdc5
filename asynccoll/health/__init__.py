"""What goes wrong, on which rank: which ranks are lost, have refused a call, or called something else.

This package asks the store and other hosts, and tells lanes. It must not know backends or contexts: the world
decides which error a call then raises.
"""
