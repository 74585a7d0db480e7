"""Models, agents and engines, built from a configuration and with the weights of a file."""
