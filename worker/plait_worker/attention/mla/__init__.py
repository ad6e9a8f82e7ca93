"""Multi-head latent attention (arXiv 2405.04434): one latent a token is cached."""
