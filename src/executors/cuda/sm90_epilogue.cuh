// What a computing warpgroup does with a tile's sums. Every warp has its own 16 rows of each 64-row block and moves them
// through its own 2 KiB of shared memory, from the layout of product() to 16-byte pieces of rows; so no warp waits for
// another. A step is one such pass: 16 rows by 128 bytes.
#pragma once

#include "executors/cuda/sm90_multiply.cuh"

namespace moelith::executors::cuda::sm90 {

using bf16 = numerics::bfloat16;

// Runs f(std::integral_constant<int, i>) for the i that equals `step`: register arrays need constant indices, while the
// code around stays in a loop.
template <int Count, class F>
__device__ __forceinline__ void with_constant(int step, F&& f) {
  [&]<int... I>(std::integer_sequence<int, I...>) {
    ((step == I ? (f(std::integral_constant<int, I>{}), true) : false) || ...);
  }(std::make_integer_sequence<int, Count>{});
}

__device__ __forceinline__ uint4 load_16(const bf16* source) { return *reinterpret_cast<const uint4*>(source); }
__device__ __forceinline__ void store_16(bf16* destination, uint4 value) { *reinterpret_cast<uint4*>(destination) = value; }
// Written by other SMs in this launch: past the first-level cache.
__device__ __forceinline__ uint4 load_16_shared_by_sms(const bf16* source) { return __ldcg(reinterpret_cast<const uint4*>(source)); }

// 8 bfloat16 values, as pairs.
struct Words {
  std::uint32_t word[4];
  __device__ explicit Words(uint4 v) : word{v.x, v.y, v.z, v.w} {}
  __device__ float low(int w) const { return low_bfloat16(word[w]); }
  __device__ float high(int w) const { return high_bfloat16(word[w]); }
  __device__ uint4 all() const { return {word[0], word[1], word[2], word[3]}; }
};

__device__ __forceinline__ void unpack(uint4 v, float (&f)[8]) {
  const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) f[2 * i] = low_bfloat16(words[i]), f[2 * i + 1] = high_bfloat16(words[i]);
}
__device__ __forceinline__ uint4 pack(const float (&f)[8]) {
  return {pack_bfloat16(f[0], f[1]), pack_bfloat16(f[2], f[3]), pack_bfloat16(f[4], f[5]), pack_bfloat16(f[6], f[7])};
}
__device__ __forceinline__ void round_all(float (&f)[8]) { unpack(pack(f), f); }

// `Count` bias values, of which `columns` exist, into the warp's shared memory as bfloat16.
template <int Count>
__device__ __forceinline__ void stage_bias(std::uint32_t staging, const bf16* bias, std::int64_t columns, int lane) {
#pragma unroll 1
  for (int pair = lane; pair < Count / 2; pair += 32) {
    const std::uint32_t packed = 2 * pair < columns ? __ldg(reinterpret_cast<const std::uint32_t*>(bias) + pair) : 0;
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(staging + pair * 4), "r"(packed) : "memory");
  }
}

// Sums rounded to bfloat16: half the registers. Word 2 g + h of a block: columns of 8-column group g, rows 8 h below.
template <int N>
struct RoundedSums {
  std::uint32_t word[2][N / 4];

  __device__ __forceinline__ explicit RoundedSums(const Sums<N>& sums) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < N / 4; ++i) {
        word[m][i] = pack_bfloat16(sums.value[m][2 * i], sums.value[m][2 * i + 1]);
        asm volatile("" : "+r"(word[m][i]));  // here, and not where it is used
      }
    }
  }
};

// Adds the bias of all N columns, which lies in the warp's shared memory. One 8-column group after the other: there are no
// registers to have more of them under way.
template <int N>
__device__ __forceinline__ void add_staged_bias(Sums<N>& sums, std::uint32_t staging, int lane) {
  __syncwarp();
#pragma unroll
  for (int g = 0; g < N / 8; ++g) {
    std::uint32_t packed;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(packed) : "r"(staging + g * 16 + lane % 4 * 4) : "memory");
    const float low = low_bfloat16(packed), high = high_bfloat16(packed);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      float* v = sums.value[m] + g * 4;
      v[0] += low, v[1] += high, v[2] += low, v[3] += high;
      asm volatile("" : "+f"(v[0]), "+f"(v[1]), "+f"(v[2]), "+f"(v[3])::"memory");
    }
  }
  __syncwarp();
}

// 8-column groups First .. First + 2 Pairs - 1 of block M into 16-byte pieces `piece` and following of the warp's rows.
// Piece c of row r lies at r * 128 + ((c ^ (r & 7)) * 16).
template <int M, int First, int Pairs, int N>
__device__ __forceinline__ void deposit_rounded(const RoundedSums<N>& sums, std::uint32_t staging, int piece, int lane) {
  const int row = (lane % 8) + (lane / 8 % 2) * 8;
#pragma unroll
  for (int pair = 0; pair < Pairs; ++pair) {
    const int c = piece + 2 * pair + lane / 16;
    const std::uint32_t* w = sums.word[M] + (First + 2 * pair) * 2;
    store_matrices(staging + row * 128 + ((c ^ (row & 7)) << 4), w[0], w[1], w[2], w[3]);
  }
}
__device__ __forceinline__ uint4 staged_piece(std::uint32_t staging, int row, int piece) {
  return load_shared_16(staging + row * 128 + ((piece ^ (row & 7)) << 4));
}

// 32 columns (8-column groups First to First + 3) of block M as float. Columns 8 o .. 8 o + 7 of row r lie at
// r * 128 + ((o ^ (r & 3)) * 32).
template <int N, int M, int First>
__device__ __forceinline__ void deposit_float(const Sums<N>& sums, std::uint32_t staging, int lane) {
  const int row = lane / 4;
#pragma unroll
  for (int g = 0; g < 4; ++g) {
    const float* v = sums.value[M] + (First + g) * 4;
    const std::uint32_t place = staging + row * 128 + ((g ^ (row & 3)) << 5) + (lane % 4) * 8;
    store_shared_8(place, v[0], v[1]);
    store_shared_8(place + 8 * 128, v[2], v[3]);
  }
}
__device__ __forceinline__ void staged_floats(std::uint32_t staging, int row, int octet, float (&f)[8]) {
  const std::uint32_t place = staging + row * 128 + ((octet ^ (row & 3)) << 5);
  const uint4 a = load_shared_16(place), b = load_shared_16(place + 16);
  f[0] = __uint_as_float(a.x), f[1] = __uint_as_float(a.y), f[2] = __uint_as_float(a.z), f[3] = __uint_as_float(a.w);
  f[4] = __uint_as_float(b.x), f[5] = __uint_as_float(b.y), f[6] = __uint_as_float(b.z), f[7] = __uint_as_float(b.w);
}

struct Warp {
  int index, lane;        // in the warpgroup
  std::uint32_t staging;  // its 2 KiB

  template <class Memory>
  __device__ static Warp now(Memory& shared) {
    const int thread = thread_now() - first_consumer;
    return {thread / 32 % 4, thread % 32, shared_address(shared.staging[thread / 32])};
  }
};

// Writes rounded sums 64 columns at a time: row r of the tile to `place(r)`, where its first column goes. `columns`: how many
// columns of the tile exist.
template <int N, class Place>
__device__ __forceinline__ void store_rounded(const RoundedSums<N>& sums, int rows, int columns, const Warp& warp, Place&& place) {
  constexpr int slabs = N / 64;
  const int steps = (rows > 64 ? 2 : 1) * slabs, lane = warp.lane, piece = lane % 8;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    with_constant<2 * slabs>(step, [&](auto constant) {
      constexpr int m = constant.value / slabs, slab = constant.value % slabs;
      deposit_rounded<m, slab * 8, 4>(sums, warp.staging, 0, lane);
    });
    __syncwarp();
    const int first_row = step / slabs * 64 + warp.index * 16, column = step % slabs * 64 + piece * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = lane / 8 + 4 * i, row = first_row + r;
      const uint4 v = staged_piece(warp.staging, r, piece);
      if (row < rows && column < columns) store_16(place(row) + column, v);
    }
    __syncwarp();
  }
}

// --- down, gate_up_dgrad: rows to their slots ------------------------------------------------------------------------

// slots[row_index[r], column ..] = rounded (sum + bias); bias: of the tile's first column, or null
template <int N>
__device__ __forceinline__ void rows_to_slots(Sums<N>& sums, const Work& work, const bf16* bias, bf16* slots, std::int64_t hidden,
                                     const Warp& warp) {
  if (bias) {
    stage_bias<N>(warp.staging, bias, hidden - work.column, warp.lane);
    add_staged_bias(sums, warp.staging, warp.lane);
  }
  store_rounded(RoundedSums<N>(sums), work.rows, static_cast<int>(hidden - work.column), warp,
                [&](int row) { return slots + work.row_index[row] * hidden + work.column; });
}

// --- gate_up ---------------------------------------------------------------------------------------------------------

// The first N / 2 columns of the sums are gate columns, the others the up columns that belong to them; without a gate the
// others are the next N / 2 columns.
template <int N>
__device__ __forceinline__ void activate_rows(const PassData& data, Sums<N>& sums, const Work& work, const Warp& warp) {
  constexpr int slabs = N / 64;  // of 32 gate and 32 up columns
  const schedule::Sizes& sizes = data.pass.sizes;
  const ExpertGroup& tensors = data.groups[work.group];
  const bool gated = sizes.gate_up_factor == 2, forward = sizes.direction == schedule::Direction::forward;
  const std::int64_t width = tensors.width, pre_width = sizes.gate_up_factor * width;
  const std::int64_t second = gated ? width : N / 2;  // from a gate column of z to its partner
  const bool weighted = work.group == 0 && !data.weight_after_down;
  const int steps = (work.rows > 64 ? 2 : 1) * slabs, lane = warp.lane;
  if (tensors.gate_up_bias) {
    const bf16* bias = tensors.gate_up_bias.of(work.expert, pre_width) + work.column;
    const std::int64_t columns = width - work.column;
    stage_bias<N / 2>(warp.staging, bias, columns, lane);
    stage_bias<N / 2>(warp.staging + N, bias + second, columns - (gated ? 0 : N / 2), lane);
    add_staged_bias(sums, warp.staging, lane);
  }
  const RoundedSums<N> rounded(sums);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    with_constant<2 * slabs>(step, [&](auto constant) {
      constexpr int m = constant.value / slabs, slab = constant.value % slabs;
      deposit_rounded<m, slab * 4, 2>(rounded, warp.staging, 0, lane);
      deposit_rounded<m, N / 16 + slab * 4, 2>(rounded, warp.staging, 4, lane);
    });
    __syncwarp();
    const int first_row = step / slabs * 64 + warp.index * 16, octet = lane % 4;
    const std::int64_t column = work.column + step % slabs * 32 + octet * 8;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const int r = lane / 4 + 8 * i, row = first_row + r;
      Words first(staged_piece(warp.staging, r, octet)), other(staged_piece(warp.staging, r, 4 + octet));
      if (row >= work.rows || column >= width) continue;
      const bool has_second = gated || column + N / 2 < width;
      const std::int64_t at = work.row_begin + row;
      if (tensors.pre_activation) {
        bf16* z = tensors.pre_activation + at * pre_width + column;
        store_16(z, first.all());
        if (has_second) store_16(z + second, other.all());
      }
      if (!forward) continue;  // recomputing: the pre-activation alone
      const float factor = weighted ? data.topk_weights[work.row_index[row]] : 1.0f;
      numerics::with_activation_kind(data.activation.kind, [&]<ActivationKind Kind>() {
        auto act = [&](float gate, float up) { return factor * numerics::activation<Kind>(data.activation, gate, up).value; };
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          if constexpr (Kind == ActivationKind::relu_squared) {
            first.word[w] = pack_bfloat16(act(first.low(w), 0.0f), act(first.high(w), 0.0f));
            other.word[w] = pack_bfloat16(act(other.low(w), 0.0f), act(other.high(w), 0.0f));
          } else {
            first.word[w] = pack_bfloat16(act(first.low(w), other.low(w)), act(first.high(w), other.high(w)));
          }
        }
      });
      bf16* a = tensors.activated + at * width + column;
      store_16(a, first.all());
      if (!gated && has_second) store_16(a + second, other.all());
    }
    __syncwarp();
  }
}

// --- down_dgrad ------------------------------------------------------------------------------------------------------

// With d = the sum (dA before the route's weight p) and z as saved: A = act(z), dprob = <d, rounded A> over each 64 columns,
// dz = p d act'(z), and p A for the gradient of down_proj.
template <int N>
__device__ __forceinline__ void activation_gradient(const PassData& data, const Sums<N>& sums, const Work& work, const Warp& warp) {
  constexpr int slabs = N / 32;
  const schedule::Sizes& sizes = data.pass.sizes;
  const ExpertGroup& tensors = data.groups[work.group];
  const bool gated = sizes.gate_up_factor == 2, after_down = work.group > 0 || data.weight_after_down;
  const std::int64_t width = tensors.width, pre_width = sizes.gate_up_factor * width;
  const int steps = (work.rows > 64 ? 2 : 1) * slabs, lane = warp.lane, octet = lane % 4;
  float dot_above = 0.0f, dot_below = 0.0f;  // of the first 32 of 64 columns, of the two rows of this lane
  // What the turn after the one at hand needs from memory. A turn: 8 rows of a step; rolled up and without arrays, since
  // registers are what this epilogue is short of.
  uint4 next_gate, next_up;
  float next_weight;
  auto fetch = [&](int turn) {
    const int step = turn / 2, row = step / slabs * 64 + warp.index * 16 + lane / 4 + 8 * (turn % 2);
    const std::int64_t column = work.column + step % slabs * 32 + octet * 8;
    next_gate = next_up = uint4{0, 0, 0, 0};
    next_weight = 1.0f;
    if (row < work.rows && column < width) {
      const bf16* z = tensors.pre_activation + (work.row_begin + row) * pre_width + column;
      next_gate = load_16_shared_by_sms(z);
      if (gated) next_up = load_16_shared_by_sms(z + width);
      if (work.group == 0) {
        next_weight = __ldg(data.topk_weights + work.row_index[row]);
      } else if (data.shared_gates) {
        next_weight = __ldg(data.shared_gates + std::int64_t(work.row_index[row]) * sizes.shared_experts + work.group - 1);
      }
    }
  };
  fetch(0);
#pragma unroll 1
  for (int turn = 0; turn < 2 * steps; ++turn) {
    const int step = turn / 2, i = turn % 2, slab = step % slabs;
    if (i == 0) {
      __syncwarp();
      with_constant<2 * slabs>(step, [&](auto constant) {
        deposit_float<N, constant.value / slabs, constant.value % slabs * 4>(sums, warp.staging, lane);
      });
      __syncwarp();
    }
    const std::int64_t column = work.column + slab * 32 + octet * 8;
    {
      const int r = lane / 4 + 8 * i, row = step / slabs * 64 + warp.index * 16 + r;
      const bool inside = row < work.rows && column < width;
      const std::int64_t at = work.row_begin + row;
      const uint4 loaded_gate = next_gate, loaded_up = next_up;
      const float weight = next_weight;
      float dot = 0.0f;
      if (turn + 1 < 2 * steps) fetch(turn + 1);
      Words gate(loaded_gate), up(loaded_up), a(uint4{0, 0, 0, 0});
      float d[8];
      staged_floats(warp.staging, r, octet, d);
      numerics::with_activation_kind(data.activation.kind, [&]<ActivationKind Kind>() {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const auto low = numerics::activation<Kind>(data.activation, gate.low(w), up.low(w));
          const auto high = numerics::activation<Kind>(data.activation, gate.high(w), up.high(w));
          const std::uint32_t rounded = pack_bfloat16(low.value, high.value);
          const float d_low = d[2 * w], d_high = d[2 * w + 1];
          if (inside) {
            dot += d_low * low_bfloat16(rounded);
            dot += d_high * high_bfloat16(rounded);
          }
          gate.word[w] = pack_bfloat16(weight * d_low * low.d_gate, weight * d_high * high.d_gate);
          up.word[w] = pack_bfloat16(weight * d_low * low.d_up, weight * d_high * high.d_up);
          a.word[w] = after_down ? pack_bfloat16(weight * low_bfloat16(rounded), weight * high_bfloat16(rounded))
                                 : pack_bfloat16(weight * low.value, weight * high.value);
        }
      });
      if (inside) {
        if (tensors.d_pre_activation) {
          bf16* dz = tensors.d_pre_activation + at * pre_width + column;
          store_16(dz, gate.all());
          if (gated) store_16(dz + width, up.all());
        }
        if (tensors.activated) store_16(tensors.activated + at * width + column, a.all());
      }
      dot += __shfl_xor_sync(~0u, dot, 1);
      dot += __shfl_xor_sync(~0u, dot, 2);
      if (slab % 2 == 1 && octet == 0 && row < work.rows && column - 32 < width) {
        const std::int64_t index = work.row_index[row];
        tensors.dprob[index * tensors.dprob_groups + (column - 32) / 64] = (i == 0 ? dot_above : dot_below) + dot;
      }
      dot_above = i == 0 ? dot : dot_above;
      dot_below = i == 0 ? dot_below : dot;
    }
  }
  __syncwarp();
  // y = p (W a + b): the bias has its share in dprob, unless p multiplies before it.
  if (tensors.down_bias && work.column_block == 0) {
    const std::int64_t hidden = sizes.hidden_size;
    const bf16* bias = tensors.down_bias.of(work.expert, hidden);
    for (int row = warp.index; row < work.rows; row += 4) {
      const std::int64_t index = work.row_index[row];
      const bf16* dy = data.dy + (work.group == 0 ? index / sizes.top_k : index) * data.dy_stride;
      float dot = 0.0f;
      for (std::int64_t c = lane * 8; after_down && c < hidden; c += 256) {
        float u[8], v[8];
        unpack(load_16(dy + c), u);
        unpack(load_16(bias + c), v);
        for (int j = 0; j < 8; ++j) dot += u[j] * v[j];
      }
      for (int distance = 16; distance > 0; distance /= 2) dot += __shfl_xor_sync(~0u, dot, distance);
      if (lane == 0) tensors.dprob[index * tensors.dprob_groups + tensors.dprob_groups - 1] = dot;
    }
  }
}

// --- weight gradients ------------------------------------------------------------------------------------------------

// 8 values to, or onto, a gradient tensor.
__device__ __forceinline__ void store_gradient(const GradientTarget& target, std::int64_t at, float (&f)[8]) {
  if (target.is_float) {
    float4* out = reinterpret_cast<float4*>(static_cast<float*>(target.data) + at);
    float4 a{f[0], f[1], f[2], f[3]}, b{f[4], f[5], f[6], f[7]};
    if (target.accumulate) {
      const float4 c = out[0], d = out[1];
      a = {c.x + a.x, c.y + a.y, c.z + a.z, c.w + a.w};
      b = {d.x + b.x, d.y + b.y, d.z + b.z, d.w + b.w};
    }
    out[0] = a, out[1] = b;
  } else {
    bf16* out = static_cast<bf16*>(target.data) + at;
    if (target.accumulate) {
      float old[8];
      unpack(load_16(out), old);
#pragma unroll
      for (int j = 0; j < 8; ++j) f[j] += old[j];
    }
    store_16(out, pack(f));
  }
}

// out[output_row + r, column ..] (+)= sum, for an [m, n] gradient of one expert. Without rows the sum is 0.
template <int N>
__device__ __forceinline__ void store_weight_gradient(const Sums<N>& sums, const Work& work, const GradientTarget& targets, std::int64_t m,
                                             std::int64_t n, const Warp& warp) {
  if (!targets || (work.sum_rows == 0 && targets.accumulate)) return;
  const GradientTarget target = targets.of(work.expert, m * n);
  const std::int64_t first = work.output_row * n + work.column;
  const int rows = work.rows, columns = static_cast<int>(n - work.column);
  if (!target.is_float && !target.accumulate) {
    bf16* out = static_cast<bf16*>(target.data) + first;
    store_rounded(RoundedSums<N>(sums), rows, columns, warp, [&](int row) { return out + row * n; });
    return;
  }
  constexpr int slabs = N / 32;
  const int steps = (rows > 64 ? 2 : 1) * slabs, lane = warp.lane, octet = lane % 4;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    with_constant<2 * slabs>(step, [&](auto constant) {
      deposit_float<N, constant.value / slabs, constant.value % slabs * 4>(sums, warp.staging, lane);
    });
    __syncwarp();
    const int column = step % slabs * 32 + octet * 8;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const int r = lane / 4 + 8 * i, row = step / slabs * 64 + warp.index * 16 + r;
      float f[8];
      staged_floats(warp.staging, r, octet, f);
      if (row < rows && column < columns) store_gradient(target, first + row * n + column, f);
    }
    __syncwarp();
  }
}

}  // namespace moelith::executors::cuda::sm90
