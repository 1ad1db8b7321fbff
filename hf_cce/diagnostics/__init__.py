"""The work behind ``hf-cce``: demo, doctor, check, estimate, gradcheck, and the bench of the loss on one's own machine."""
