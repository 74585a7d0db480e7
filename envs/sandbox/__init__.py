"""Sandbox for programs that an agent writes: `client` runs them, in processes of `server`."""
