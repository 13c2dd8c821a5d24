"""The paths of the server, a file for each kind; every file defines `router`."""
