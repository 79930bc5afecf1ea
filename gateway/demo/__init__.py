"""The demo, and the replay of traces against a real server."""
