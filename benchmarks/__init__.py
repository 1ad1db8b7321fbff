"""Measurements behind the tables of README.md and docs/, run from the repository's root; not part of the installed package.

``results/`` holds the newest run of each table; ``python -m benchmarks.report`` writes the tables. Each script has ``--help``.
"""
