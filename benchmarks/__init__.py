"""Benchmarks behind the tables of README.md and docs/; run them from the repository root. Not part of the installed package.

``results/`` holds the newest run of each table; ``python -m benchmarks.report`` writes the tables. Each script has ``--help``.
"""
