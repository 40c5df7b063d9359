"""The rubric of the synthetic assignments: 40 points, 5 of them for a model or a human."""

RUBRIC = """\
schema: 1
assignment: sales-{language}
title: Sales analysis
version: "1"
language: {language}
total: 40
instructions: >
  Read sales.csv. Compute the total revenue, the revenue by region and the average order.
  Answer both questions in the reflection.
late: {{per_day_percent: 10, grace_minutes: 15, max_percent: 50}}
items:
  - id: runs
    title: The notebook runs from top to bottom
    points: 2.5
    check: {{kind: ran}}
  - id: variables
    title: The required variables exist
    points: 7.5
    check: {{kind: variables, names: [rows, total_revenue, by_region]}}
  - id: function
    title: A function computes the revenue
    points: 5
    check: {{kind: functions, use: define, names: [revenue]}}
  - id: total
    title: The total revenue is right
    points: 5
    check: {{kind: output, where: {{tag: total}}, compare: number, abs_tol: 0.01}}
  - id: regions
    title: The revenue by region is right
    points: 5
    check: {{kind: output, where: {{tag: regions}}, compare: table, abs_tol: 0.01}}
  - id: average
    title: The average order is right
    points: 5
    check: {{kind: output, where: {{variable: avg_order}}, compare: number, abs_tol: 0.01}}
  - id: reflection
    title: The reflection answers both questions
    points: 5
    check: {{kind: words, min_words: 20, questions: [Question 1, Question 2], where: {{section: Reflection}}}}
    feedback: Write at least 20 words for each question.
  - id: clarity
    title: The code is clear
    points: 5
    guideline: Names say what they hold; no code is there twice.
    check: {{kind: model, question: "Does every name in the code say what the value is?"}}
"""
