"""Layers: `hla.nn.torch`. Importing this package imports no framework, importing one of its modules does."""
