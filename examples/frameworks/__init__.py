"""Each framework's own trainer beside the same with its recipe: ``make test-frameworks``, in their environments."""
