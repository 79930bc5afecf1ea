"""The `terazi` command."""
