"""Models: the small vision-language model, pretrained models, decoder inputs and the sampling distribution."""
