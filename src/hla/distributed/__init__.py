"""Sequences longer than one device: `hla.distributed.torch` and `hla.distributed.jax`. Importing this package imports
no framework, importing one of its modules does."""
