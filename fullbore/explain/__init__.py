"""Why is this pipeline idle: evidence to facts to verdicts, and what a setting does in the source."""
