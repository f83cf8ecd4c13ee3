"""From a caller's arguments to the description of a call, and the implementation that serves it."""
