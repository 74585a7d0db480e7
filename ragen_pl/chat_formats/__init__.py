"""Chat templates and notations of tool calls of families of models."""
