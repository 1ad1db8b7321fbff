"""Implementation of the ``hf-cce`` sub-commands demo, doctor, check, estimate, gradcheck and bench."""
