"""The figures of the notebooks: a module for each notebook, and the style they share."""
