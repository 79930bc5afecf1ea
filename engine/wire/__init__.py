"""What gateway and engine say to each other, and how it is framed on a socket."""
