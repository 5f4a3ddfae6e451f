"""What was recorded about every stage-second."""
