"""The equations. Nothing here knows a tile, a device or a mesh."""
