"""A rubric to start from."""

EXAMPLE = """# A rubric: items with points, and how each is checked. `disagg-grade check-rubric rubric.yaml` checks it.
assignment: homework-1
title: Sales by region
instructions: Load sales.csv, compute the mean and the total, plot them, and say what you see.
items:
  - id: loads
    title: The data is loaded into `sales`
    points: 2
    check: {kind: variables, names: [sales]}
  - id: mean
    title: The mean is right
    points: 4
    check: {kind: output, where: {variable: mean_sales}, compare: number, rel_tol: 0.001}
  - id: ran
    title: All cells ran, without an error
    points: 2
    check: {kind: ran}
  - id: reflection
    title: A conclusion of at least 40 words
    points: 2
    check: {kind: words, min_words: 40, questions: [Conclusion]}
  - id: names
    title: Variables have clear names
    points: 2
    guideline: One-letter names for data are not clear. Loop counters are fine.
    check: {kind: model, question: "Do all variables that hold data have clear names?"}
late: {per_day_percent: 10, max_percent: 50}
"""
