"""Deferred logits: what an LM head returns instead of multiplying, and what answers for them."""
