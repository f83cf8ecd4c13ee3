"""A call: its arguments checked once, its options, its rows, and what of it is static."""
