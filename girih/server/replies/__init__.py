"""What goes back: bodies and streams as OpenAI's, made of `RequestOutput`s."""
