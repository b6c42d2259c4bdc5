"""Detect and explain failures: which ranks are lost, have refused a call, or called something else.

This package queries the store and other hosts, and notifies lanes. It must not know about backends or
contexts: the world decides which error a call then raises.
"""
