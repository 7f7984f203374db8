r"""The kernels. All of them are about one primitive and its two directions in time.

A state is X = Σ Γ^p y zᵀ over the tokens on one side, a read is r = x·X, plus the pairs inside the chunk:

    forwards    X_out = Γ(C−1,−1)^p X_in + Σ_j Γ(C−1,j)^p y_j z_jᵀ
                r_t = Γ(t,−1)^p x_tᵀ X_in + Σ_{j≤t} Γ(t,j)^p (x_t·y_j) z_j
    backwards   X_in = Γ(C−1,−1)^p X_out + Σ_t Γ(t,−1)^p y_t z_tᵀ
                r_j = Γ(C−1,j)^p x_jᵀ X_out + Σ_{t≥j} Γ(t,j)^p (x_j·y_t) z_t

The gradient of the first is made of both (`hla.adjoint`), so there is no other arithmetic over tokens:

| kernel | does |
|---|---|
| `clock.clock` | log-decays, masks and boundaries of each chunk, as sums |
| `chain.chain` | chunk after chunk: a state, what is read of it, and a second state that takes the result |
| `carry.carry` | what precedes each part of a long sequence, from the totals of the parts |
| `read.read` | all chunks at once: the reads, from the states at the chunks' borders |
| `rate.rate` | all chunks at once: the gradient of the log-decays |
| `token.token` | token after token: form "recurrent" and decode steps |

A view is a pointer and a tuple of strides: three batch axes, then the tensor's own. Offsets are 64 bits wide, the whole
grid is on axis 0, and every width is padded to a power of two and masked.
"""
