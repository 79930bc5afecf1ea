"""The gateway process and the command line. The files here are what several folders below use."""
