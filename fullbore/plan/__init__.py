"""What a pipeline would do: cost curves, workloads, and the scheduler on a virtual clock. Pure: no torch, no clock."""
