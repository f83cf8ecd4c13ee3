"""A language model trained and then improved by reinforcement learning, with no logits stored: an example to read.

``python -m examples.demo`` runs it; ``cli.py`` is the story, the other modules its chapters: `text`, `model`, `reward`,
`sft`, `rl`, `stored`, `evaluate`, `compare`, `progress`, `report`.
"""
