"""Deferred logits: what an LM head returns instead of computing its product, and the losses computed from them."""
