"""Patches of other libraries; each file states the cause, the versions that were checked, and when it can be removed."""
