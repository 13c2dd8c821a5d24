"""The building blocks of models. A layer takes all it needs as arguments; none knows a model or a device."""
