"""The memory that a run needs, planned before a model is loaded, and settings that reduce it."""
