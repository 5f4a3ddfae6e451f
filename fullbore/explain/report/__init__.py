"""The answer, as data, as text and as a page."""
