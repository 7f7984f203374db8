/* One state of a program over one sequence. REAL is float or double. */
#include <stddef.h>

/* X (d, dv) moves on, X = g_t X + b_t c_t^T, and each of n rows of queries reads it, r_t = a_t^T X, for t < T.
   g (T), b (T, d), c (T, dv), a (n, T, d), r (n, T, dv). Where g_t is 0, X is dropped, whatever it held. */
void move_and_read(size_t T, size_t n, size_t d, size_t dv, const REAL *g, const REAL *b, const REAL *c, const REAL *a,
                   REAL *restrict r, REAL *restrict X) {
  for (size_t t = 0; t < T; t++, g++, b += d, c += dv) {
    for (size_t i = 0; i < d; i++) {
      REAL *row = X + i * dv;
      if (*g == 0)
        for (size_t j = 0; j < dv; j++) row[j] = b[i] * c[j];
      else
        for (size_t j = 0; j < dv; j++) row[j] = *g * row[j] + b[i] * c[j];
    }
    for (size_t m = 0; m < n; m++) {
      const REAL *query = a + (m * T + t) * d;
      REAL *result = r + (m * T + t) * dv;
      for (size_t j = 0; j < dv; j++) result[j] = 0;
      for (size_t i = 0; i < d; i++)
        for (size_t j = 0; j < dv; j++) result[j] += query[i] * X[i * dv + j];
    }
  }
}
