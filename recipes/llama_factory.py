"""LLaMA-Factory's training with the loss of hf_cce: what `llamafactory-cli train FILE.yaml` does, and one callback more.

    python recipes/llama_factory.py FILE.yaml
    torchrun --nproc-per-node 8 recipes/llama_factory.py FILE.yaml

LLaMA-Factory 0.9.5 has no key in its YAML for callbacks of others. Leave out `enable_liger_kernel`. A file named like the package
would stand in its way, hence the name of this one.
"""

from __future__ import annotations

from llamafactory.train.tuner import run_exp

from hf_cce import CCECallback

if __name__ == "__main__":
    run_exp(callbacks=[CCECallback()])
