"""The rollout phase: environments, contexts and the turn loop that joins them to an engine."""
