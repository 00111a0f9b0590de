// exp(x) for x <= 0, written with a level's own vectors.
#pragma once

namespace {

// x = n ln 2 + r with |r| <= ln 2 / 2, exp(x) = 2^n exp(r); exp(r) as the polynomial of
// S. Moshier's Cephes library (expf.c), accurate to about one unit in the last place.
// NaN gives NaN; a result below the smallest normal float is 0.
inline vec exp(vec x) {
  const float least = -87.33654f;
  const vec bounded = max(all(least), x);
  const vec n = nearest(mul(bounded, all(1.44269504088896341f)));
  vec r = fma(n, all(-0.693359375f), bounded);
  r = fma(n, all(2.12194440e-4f), r);
  vec p = all(1.9875691500e-4f);
  p = fma(p, r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), all(1.0f));
  return zero_below(x, least, mul(p, power_of_two(n)));
}

}  // namespace
