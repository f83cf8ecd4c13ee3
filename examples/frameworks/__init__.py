"""Frameworks' own trainers compared with our recipes: ``make test-frameworks`` runs them in their environments."""
