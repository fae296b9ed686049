"""VILA-U (arXiv 2409.04429), the model family of FastCar's paper: Llama, an RQ-transformer depth head, an RQ-VAE."""
