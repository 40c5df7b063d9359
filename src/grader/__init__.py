"""The homework grader: notebooks in, points with evidence out. Layers 1 and 2 need no model."""
