"""The running pipeline: driver, stage processes and the transport between them."""
