"""Bridges to other libraries: `hla.integrations.transformers`. Importing this package imports no framework."""
