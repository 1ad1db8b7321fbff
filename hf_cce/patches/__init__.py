"""Patches of other libraries; each file states the cause, the versions that were read, and when it can be removed."""
