"""Play an environment in the terminal, as a person or with a policy."""
