"""Plugins that other projects load by name or by path: hf_cce in Axolotl and ms-swift by one line of configuration.

``import hf_cce`` imports nothing of it. No file here may be named like a package: ms-swift puts this folder on ``sys.path``.
"""
