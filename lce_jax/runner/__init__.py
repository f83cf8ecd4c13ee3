"""The runner: one device's program becomes one differentiable call on all devices that hold its operands."""
