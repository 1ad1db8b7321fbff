"""Measuring and showing: the demo's twin runs, the losses' benchmark, plots. Uses only the public names of hf_cce."""
