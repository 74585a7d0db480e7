"""Agent programs as environments: their processes, tasks and results (`env=program`)."""
