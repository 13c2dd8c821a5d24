"""The bodies of requests, as OpenAI's; a field that is not here is refused."""
