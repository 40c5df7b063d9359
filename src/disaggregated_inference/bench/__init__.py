"""Benchmarks: one table and one JSON each, every figure beside a baseline measured in the same run."""
