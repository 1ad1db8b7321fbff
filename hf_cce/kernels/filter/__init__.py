"""Loss with the gradient filter: the backward pass computes only those tiles of the logits' gradient that matter.

Modules, in the order of a filtered step:

- ``order``: sort vocabulary and tokens, so that few tiles hold most of the gradient.
- ``run``: forward pass (loss and tile statistics), and backward pass, which uses the modules below.
- ``select``: choose the tiles to keep, and compute the probability mass of the dropped ones.
- ``corrections``: correct the gradients, to first order, for what this mass does not capture.
- ``error``: estimate the error in some of the steps; ``hf_cce.filter_state`` adjusts the threshold.
- ``sparse``: compute the kept tiles and multiply them with weight and hidden states.
- ``workspace``: divide the scratch memory.
"""
