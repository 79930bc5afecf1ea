"""A request's way through OpenAI's HTTP API, from its head to its last byte."""
