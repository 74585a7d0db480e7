"""Files, seeds, limits of values and formats of prompts, for all parts."""
