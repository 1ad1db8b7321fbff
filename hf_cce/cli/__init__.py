"""The command ``hf-cce``: one thin file for each sub-command; ``hf_cce.diagnostics`` does the work."""
