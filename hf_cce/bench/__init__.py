"""Measuring and showing: the demo's twin training run, its text, its plots. Uses only the public names of hf_cce."""
