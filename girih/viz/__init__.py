"""Pictures of a plan: `terminal` for the screen, `svg` and `png` for a file. All draw the rows of `_rows`."""
