"""Pictures of a plan: `terminal` for the screen, `svg` for a file. Both draw the rows of `_rows`."""
