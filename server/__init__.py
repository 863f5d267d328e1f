"""The OpenAI-compatible HTTP server; the one package here that may read environment variables."""
