"""The command ``hf-cce``: one file a command, each thin; the work is done by ``hf_cce.bench`` and the public names."""
