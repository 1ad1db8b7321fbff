"""``hf-cce models``: list the model types of the installed Transformers that train without logits, and why others do not."""

from __future__ import annotations

import argparse
import textwrap

from hf_cce.cli.common import Output

MEANING = {
    "supported": "apply_cce patches it, and training materializes no full logits",
    "special": "the loss is correct, but a tensor as large as the logits is still materialized",
    "refused": "apply_cce raises an error",
}


def run(options: argparse.Namespace, out: Output) -> int:
    """List the model types of the installed Transformers.

    Supported: training materializes no full logits. Special: the loss is correct, but a tensor as large as the logits is still
    materialized. Refused: apply_cce raises an error with the reason.

    Exit codes: 0 if the types were listed, 2 if Transformers cannot be loaded.
    """
    import transformers

    from hf_cce.families import families

    known = families()
    by_status = {status: [family for family in known if family.status == status] for status in MEANING}
    supported = [family.model_type for family in by_status["supported"]]
    out.print(f"Supported by hf_cce, in transformers {transformers.__version__}: {len(supported)} model types")
    out.print(textwrap.fill(", ".join(supported), 118, initial_indent="  ", subsequent_indent="  "))
    for status in ("special", "refused"):
        out.print("", f"{status.capitalize()}: {MEANING[status]}")
        out.print(*(f"  {family.model_type}: {family.reason}" for family in by_status[status]))
    out.print("", "Other classes with an LM head work too: apply_cce(model) checks the model itself, not this list.")
    out.save([{"type": x.model_type, "class": x.cls, "status": x.status, "reason": x.reason} for x in known])
    return 0
