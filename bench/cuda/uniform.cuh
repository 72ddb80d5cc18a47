// Random numbers that depend on their place alone (SplitMix64, https://prng.di.unimi.it/splitmix64.c).
#pragma once

#include <cstdint>

// The n-th number, in (-1, 1).
__device__ inline float uniform(std::uint64_t n) {
  n += 0x9e3779b97f4a7c15ull;
  n = (n ^ (n >> 30)) * 0xbf58476d1ce4e5b9ull;
  n = (n ^ (n >> 27)) * 0x94d049bb133111ebull;
  n ^= n >> 31;
  return (float(n >> 40) + 0.5f) * (2.0f / 16777216.0f) - 1.0f;
}
