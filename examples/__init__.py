"""Programs to read and to run: one for each recipe of the documentation, and `demo`, a model trained from the start."""
