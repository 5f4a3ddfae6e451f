"""Build and run one pipeline stage of a model from a checkpoint."""
