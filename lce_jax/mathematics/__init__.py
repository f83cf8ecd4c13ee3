"""The equations. Nothing in this folder depends on a tile size, a device or a mesh."""
