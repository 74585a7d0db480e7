"""The memory that a run needs, planned before a model is loaded, and what makes it fit."""
