"""All that reaches into other people's code; each file says the cause, the versions it was read in, when it can go."""
