"""What is installed on a machine, and what is missing."""
