"""What one device computes, with its collectives, and how the runner takes it. Each file has one function's."""
