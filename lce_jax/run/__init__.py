"""Computes a described call: one file for each function, the code that they share, and the entries for the bridge."""
