"""Assistant messages as models write them in their own chat formats: reasoning, text and tool calls."""
