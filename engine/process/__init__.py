"""The engine as a process: its loop, its socket, its samples."""
