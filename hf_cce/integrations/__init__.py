"""Plugins that other projects load by name or by path: Axolotl, ms-swift and lm-evaluation-harness.

``import hf_cce`` does not import them. No file here may be named like a package, as ms-swift puts this folder on ``sys.path``.
"""
