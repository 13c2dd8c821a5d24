"""The engine: bring-up and steps (`core`), and the front end for programs (`llm`)."""
