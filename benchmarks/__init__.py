"""Benchmark scripts behind the tables of README.md and docs/. Run them from the repository root; they are not installed.

``results/`` holds the newest run for each table, and ``python -m benchmarks.report`` writes the tables. Each script has
``--help``.
"""
