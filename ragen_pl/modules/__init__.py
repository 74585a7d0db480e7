"""The LightningModules: policy, critic, and the agent that composes them."""
