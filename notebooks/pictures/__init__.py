"""What the notebooks draw: a module for each of them, and the style they share."""
