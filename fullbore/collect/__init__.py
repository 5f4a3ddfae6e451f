"""Gathers evidence from servers and hosts: the I/O that `record` and `explain` need."""
