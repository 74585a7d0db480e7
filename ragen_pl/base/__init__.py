"""What all parts use: files, seeds, limits of values, formats of prompts."""
