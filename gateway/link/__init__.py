"""The gateway's end of the engine: its process, its socket, its lives."""
