"""Models: the small vision-language model, loading pretrained ones, and what a policy is made of."""
