"""Text of prompts and responses: conversations, contexts that fit the model, and parsed responses."""
