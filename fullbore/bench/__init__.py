"""Load for any OpenAI-compatible server, and what came of it."""
