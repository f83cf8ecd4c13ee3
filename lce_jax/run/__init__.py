"""What runs a described call: one file for each function, what they share, and what the bridge launches."""
