"""``python -m hf_cce``: the same as the command ``hf-cce``."""

from hf_cce.cli.app import main

if __name__ == "__main__":
    raise SystemExit(main())
