from support.runs.memory_plans import folder

__all__ = ["folder"]
