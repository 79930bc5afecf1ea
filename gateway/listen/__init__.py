"""Sockets and HTTP's bytes, below the application."""
