// Philox for sixteen counters at a time, which differ in (c0, c1, c2): bit-equal to common/philox.h.
//
// A round is a chain of dependent steps, so four vectors of four counters go through it side by side.
#pragma once

#include "common/u32x4.h"

namespace gnnsys {

constexpr int kChains = 4;
constexpr int kLanes = 4 * kChains;

// state[v] = {c0, c1, c2, c3} of counters 4v .. 4v + 3; overwritten by their random words.
inline void philox4x32_lanes(u32x4 state[kChains][4], uint64_t key) {
  auto k0 = static_cast<uint32_t>(key);
  auto k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int v = 0; v < kChains; ++v) {
      u32x4 high0, low0, high1, low1;
      multiply(state[v][0], 0xD2511F53u, &high0, &low0);
      multiply(state[v][2], 0xCD9E8D57u, &high1, &low1);
      state[v][0] = high1 ^ state[v][1] ^ splat(k0);
      state[v][1] = low1;
      state[v][2] = high0 ^ state[v][3] ^ splat(k1);
      state[v][3] = low0;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

}  // namespace gnnsys
