"""An example to read: a language model is trained, then improved by reinforcement learning, without stored logits.

``python -m examples.demo`` runs it. ``cli.py`` has the course of a run. Each other module has one part: `text`,
`model`, `reward`, `sft`, `rl`, `stored`, `evaluate`, `compare`, `progress`, `report`.
"""
