"""Files: reading and writing them, and the range of every value that a file may hold."""
