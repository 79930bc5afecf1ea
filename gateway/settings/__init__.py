"""The server's settings: the table, the file, the value and where it comes from."""
