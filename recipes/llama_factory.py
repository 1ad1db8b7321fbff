"""LLaMA-Factory's training with the loss of hf_cce: `llamafactory-cli train FILE.yaml` with one more callback.

    python recipes/llama_factory.py FILE.yaml
    torchrun --nproc-per-node 8 recipes/llama_factory.py FILE.yaml

The YAML of LLaMA-Factory 0.9.5 has no key for custom callbacks. Do not set `enable_liger_kernel`. This file cannot be called
llamafactory.py: it would shadow the package.
"""

from __future__ import annotations

from llamafactory.train.tuner import run_exp

from hf_cce import CCECallback

if __name__ == "__main__":
    run_exp(callbacks=[CCECallback()])
