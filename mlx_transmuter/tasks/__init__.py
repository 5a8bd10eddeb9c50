"""The tasks: a model and settings in, a callable out that takes what people have and gives what they read."""
