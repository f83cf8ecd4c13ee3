"""Turns a caller's arguments into the description of a call, and chooses the implementation that serves it."""
