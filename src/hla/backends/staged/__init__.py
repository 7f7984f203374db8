"""A program as launches of a few kernels, stage by stage: what is common to all backends that have these kernels.

An engine (`hla.backends.staged.engine`) has the kernels `clock`, `chain`, `carry`, `read`, `rate` and `token`, which
`hla.backends.triton.kernels` describes, and knows its arrays. The rest is here: how tokens are cut into chunks, which
states and reads run in one pass, how a gradient is made of the same kernels, and how arrays of any strides are given to
them without copies.
"""
