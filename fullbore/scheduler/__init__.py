"""Who runs next, with which tokens, in which KV blocks. Pure: no torch, no clock, no I/O."""
