"""The loss with the gradient filter: only tiles of the logits' gradient that matter are computed.

A filtered step, in the order of its modules:

- ``order``: sort vocabulary and tokens, so that few tiles hold most of the gradient.
- ``run``: loss, and statistics of each tile; after it, what the backward pass does.
- ``select``: choose the tiles to keep; the others leave their mass.
- ``corrections``: what the mass of dropped tiles leaves out, to first order.
- ``error``: estimate the error, in some steps; ``hf_cce.filter_state`` moves the threshold.
- ``sparse``: compute the kept tiles and multiply them with weight and hidden states.
- ``workspace``: the division of the scratch memory.
"""
