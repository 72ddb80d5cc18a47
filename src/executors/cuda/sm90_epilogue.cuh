// What a computing warpgroup does with a tile's sums. Every warp has its own 16 rows of each 64-row block and moves
// them through its own 2 KiB of shared memory, from the layout of product() to 16-byte pieces of rows; so no warp waits
// for another. A step is one such pass: 16 rows by 128 bytes.
#pragma once

#include "executors/cuda/sm90_multiply.cuh"
#include "executors/cuda/sm90_ranks.cuh"

namespace moelith::executors::cuda::sm90 {

using bf16 = numerics::bfloat16;

// Runs f(std::integral_constant<int, i>) for the i that equals `step`: register arrays need constant indices, while the
// code around stays in a loop.
template <int Count, class F>
__device__ __forceinline__ void with_constant(int step, F&& f) {
  [&]<int... I>(std::integer_sequence<int, I...>) {
    ((step == I ? (f(std::integral_constant<int, I>{}), true) : false) || ...);
  }
  (std::make_integer_sequence<int, Count>{});
}

__device__ __forceinline__ uint4 load_16(const bf16* source) { return __ldca(reinterpret_cast<const uint4*>(source)); }
// The compiler does not know that pointers from shared memory are to global memory.
__device__ __forceinline__ void store_16(bf16* destination, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(destination), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
// Written by other SMs in this launch: past the first-level cache.
__device__ __forceinline__ uint4 load_16_shared_by_sms(const bf16* source) {
  return __ldcg(reinterpret_cast<const uint4*>(source));
}

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

// Bias of the first `columns` of a product's N columns (0 for the others) into the warp's shared memory as bfloat16;
// place(c): where that of columns c and c + 1 is.
template <int N, class Place>
__device__ __forceinline__ void stage_bias(std::uint32_t staging, int columns, int lane, Place&& place) {
#pragma unroll 1
  for (int c = 2 * lane; c < N; c += 64) {
    const std::uint32_t packed = c < columns ? __ldg(reinterpret_cast<const std::uint32_t*>(place(c))) : 0;
    store_shared_4(staging + c * 2, packed);
  }
}

// Sums rounded to bfloat16: half the registers. Word 2 g + h of a block: columns of 8-column group g, rows 8 h below.
template <int N>
struct RoundedSums {
  static constexpr int slabs = N / 64;  // of 64 columns
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

// Adds the bias of all N columns, which lies in the warp's shared memory. One 8-column group after the other: there are
// no registers to have more of them under way.
template <int N>
__device__ __forceinline__ void add_staged_bias(Sums<N>& sums, std::uint32_t staging, int lane) {
  __syncwarp();
#pragma unroll
  for (int g = 0; g < N / 8; ++g) {
    const std::uint32_t packed = load_shared_4(staging + g * 16 + lane % 4 * 4);
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
__device__ __forceinline__ void deposit_rounded(const RoundedSums<N>& sums, std::uint32_t staging, int piece,
                                                int lane) {
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

// 32 columns (8-column groups `first` to first + 3) of block M as float: the upper or lower 8 rows of the warp's 16. Columns
// 8 o .. 8 o + 7 of row r lie at r * 128 + ((o ^ (r & 3)) * 32).
template <int N, int M, int Lower>
__device__ __forceinline__ void deposit_float(const Sums<N>& sums, int first, std::uint32_t staging, int lane) {
  const int row = lane / 4;
#pragma unroll
  for (int g = 0; g < 4; ++g) {
    const float* v = sums.value[M] + (first + g) * 4 + 2 * Lower;
    store_shared_8(staging + row * 128 + ((g ^ (row & 3)) << 5) + (lane % 4) * 8, v[0], v[1]);
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

// Puts 64 columns of block m (slab: from column 64 * slab) into the warp's shared memory.
template <int N>
__device__ __forceinline__ void deposit_slab(const RoundedSums<N>& sums, int m, int slab, const Warp& warp) {
  constexpr int slabs = RoundedSums<N>::slabs;
  with_constant<2 * slabs>(m * slabs + slab, [&](auto constant) {
    deposit_rounded<constant.value / slabs, constant.value % slabs * 8, 4>(sums, warp.staging, 0, warp.lane);
  });
  __syncwarp();
}

// Writes rounded sums 64 columns at a time: row r of the tile to `place(r)`, where its first column goes. `columns`:
// how many columns of the tile exist.
template <int N, class Place>
__device__ __forceinline__ void store_rounded(const RoundedSums<N>& sums, int rows, int columns, const Warp& warp,
                                              Place&& place) {
  const int lane = warp.lane, piece = lane % 8;
#pragma unroll 1
  for (int m = 0; m * 64 < rows; ++m) {
#pragma unroll 1
    for (int slab = 0; slab * 64 < columns; ++slab) {
      deposit_slab(sums, m, slab, warp);
      const int first_row = m * 64 + warp.index * 16, column = slab * 64 + piece * 8;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = lane / 8 + 4 * i, row = first_row + r;
        const uint4 v = staged_piece(warp.staging, r, piece);
        if (row < rows && column < columns) store_16(place(row) + column, v);
      }
      __syncwarp();
    }
  }
}

// --- down, gate_up_dgrad: rows to their slots ------------------------------------------------------------------------

// slots[row_index[r], column ..] = rounded (sum + bias), at the rank of each row; bias: of the tile's first column, or
// null
template <int N, bool Ranks>
__device__ __forceinline__ void rows_to_slots(Sums<N>& sums, const Work& work, const bf16* bias, bf16* slots,
                                              std::int64_t hidden, const Warp& warp) {
  if (bias) {
    stage_bias<N>(warp.staging, work.columns, warp.lane, [&](int column) { return bias + column; });
    add_staged_bias(sums, warp.staging, warp.lane);
  }
  store_rounded(RoundedSums<N>(sums), work.rows, work.columns, warp,
                [&](int row) { return slot_of_row<Ranks>(work, slots, hidden, row) + work.column; });
}

// The pre-activation that a tile writes or reads. Only that of the first round is kept for backward, which makes the others' again,
// where dZ comes to lie: element by element it takes their place.
template <bool Ranks>
__device__ __forceinline__ bf16* pre_activation_of(const PassData& data, const Work& work) {
  const ExpertGroup& tensors = data.groups[work.group];
  if (!Ranks || work.round == 0 || data.pass.sizes.recompute) return tensors.pre_activation;
  return tensors.d_pre_activation;  // none in forward
}

// --- gate_up ---------------------------------------------------------------------------------------------------------

// Of each 64 columns of the sums, 32 are gate columns and 32 the up columns that belong to them; without a gate all are
// columns of the output.
template <int N, bool Ranks>
__device__ __forceinline__ void activate_rows(const PassData& data, Sums<N>& sums, const Work& work, const Warp& warp) {
  const schedule::Sizes& sizes = data.pass.sizes;
  const ExpertGroup& tensors = data.groups[work.group];
  const bool gated = sizes.gate_up_factor == 2, forward = sizes.direction == schedule::Direction::forward;
  const std::int64_t width = tensors.width, pre_width = sizes.gate_up_factor * width;
  const std::int64_t second = gated ? width : 32;  // from a column of z to its partner
  const int slab_columns = gated ? 32 : 64;
  const bool weighted = work.group == 0 && !data.weight_after_down;
  const int lane = warp.lane;
  if (tensors.gate_up_bias) {
    const bf16* bias = tensors.gate_up_bias.of(work.expert, pre_width) + work.column;
    const int last = work.columns % 32, whole = work.columns - last;  // a slab that is cut has zeros in its middle
    stage_bias<N>(warp.staging, gated ? (last ? 2 * whole + 64 : 2 * whole) : work.columns, lane, [&](int c) {
      if (!gated) return bias + c;
      const int inside = c / 64 * 32 + c % 32;  // beyond the last column any value will do
      return (c % 64 < 32 ? bias : bias + width) + (inside < work.columns ? inside : 0);
    });
    add_staged_bias(sums, warp.staging, lane);
  }
  const RoundedSums<N> rounded(sums);
  bf16* const z = pre_activation_of<Ranks>(data, work);
  bf16* const activated = forward ? tensors.activated : nullptr;  // recomputing: z alone
  const int octet = lane % 4, columns = work.columns;
  numerics::with_activation_kind(data.activation.kind, [&]<ActivationKind Kind>() {
    constexpr bool pairs = Kind != ActivationKind::relu_squared;  // of gate and up
    const numerics::ActivationParameters<float> parameters(data.activation);
#pragma unroll 1
    for (int m = 0; m * 64 < work.rows; ++m) {
      // Of this lane's two rows of the warp's 16, in elements from the tensors' beginnings.
      std::int64_t z_place[2], a_place[2];
      bool row_there[2];
      float factor[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = m * 64 + warp.index * 16 + lane / 4 + 8 * i;
        row_there[i] = row < work.rows;
        z_place[i] = (work.held_begin + row) * pre_width + work.column + octet * 8;
        a_place[i] = (work.held_begin + row) * width + work.column + octet * 8;
        factor[i] = weighted && row_there[i] ? weight_of_row<Ranks>(data, work, row) : 1.0f;
      }
#pragma unroll 1
      for (int slab = 0; slab * slab_columns < columns; ++slab) {
        deposit_slab(rounded, m, slab, warp);
        const int offset = slab * slab_columns, inside = offset + octet * 8;
        const bool there = inside < columns, has_second = pairs ? there : inside + 32 < columns;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int r = lane / 4 + 8 * i;
          Words first(staged_piece(warp.staging, r, octet)), other(staged_piece(warp.staging, r, 4 + octet));
          if (z && row_there[i]) {
            if (there) store_16(z + z_place[i] + offset, first.all());
            if (has_second) store_16(z + z_place[i] + offset + second, other.all());
          }
          auto act = [&](float gate, float up) {
            return factor[i] * numerics::activation<Kind>(parameters, gate, up).value;
          };
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            if constexpr (pairs) {
              first.word[w] = pack_bfloat16(act(first.low(w), other.low(w)), act(first.high(w), other.high(w)));
            } else {
              first.word[w] = pack_bfloat16(act(first.low(w), 0.0f), act(first.high(w), 0.0f));
              other.word[w] = pack_bfloat16(act(other.low(w), 0.0f), act(other.high(w), 0.0f));
            }
          }
          if (activated && row_there[i]) {
            if (there) store_16(activated + a_place[i] + offset, first.all());
            if (!pairs && has_second) store_16(activated + a_place[i] + offset + second, other.all());
          }
        }
        __syncwarp();
      }
    }
  });
}

// --- down_dgrad ------------------------------------------------------------------------------------------------------

// As hold() of registers of sums.
__device__ __forceinline__ void hold(numerics::ActivationValue<float>& v) {
  asm volatile("" : "+f"(v.value), "+f"(v.d_gate), "+f"(v.d_up));
}

// With d = the sum (dA before the route's weight p) and z as saved: A = act(z), dprob = <d, rounded A> over each 64
// columns, dz = p d act'(z), and p A for the gradient of down_proj.
template <ActivationKind Kind, int N, bool Ranks>
__device__ __forceinline__ void activation_gradient_of(const PassData& data, const Sums<N>& sums, const Work& work,
                                                       const Warp& warp) {
  constexpr int all_slabs = N / 32;
  constexpr bool gated = Kind != ActivationKind::relu_squared;
  const schedule::Sizes& sizes = data.pass.sizes;
  const ExpertGroup& tensors = data.groups[work.group];
  const bool after_down = work.group > 0 || data.weight_after_down;
  const std::int64_t width = tensors.width, pre_width = (gated ? 2 : 1) * width;
  const bf16* const z = pre_activation_of<Ranks>(data, work);
  bf16 *const dz = tensors.d_pre_activation, *const activated = tensors.activated;
  const numerics::ActivationParameters<float> parameters(data.activation);
  const int slabs = work.n / 32, lane = warp.lane, octet = lane % 4, columns = work.columns;
  if (columns == 0) return;
  // A step: 8 rows by 32 columns, of which a lane has 8 columns of one row. Steps of the same rows follow each other. What
  // a step reads was asked for two steps before, and all its activations are worked out before anything is made of them: a
  // warp has nothing else to do meanwhile.
  //
  // Of each 64 rows come first the upper 8 of the warp's 16, then the lower. row_of: where the lane's row is in the tile, there
  // or not; z_of and weight_of: that row's, or those of the tile's last where it is not there.
  auto row_of = [&](int eight) { return eight / 2 * 64 + warp.index * 16 + eight % 2 * 8 + lane / 4; };
  auto z_of = [&](int row) { return z + (work.held_begin + min(row, work.rows - 1)) * pre_width + work.column + octet * 8; };
  auto weight_of = [&](int row) {
    row = min(row, work.rows - 1);
    if (work.group == 0) return weight_of_row<Ranks>(data, work, row);
    return data.shared_gates ? __ldg(data.shared_gates + std::int64_t(work.row_index[row]) * sizes.shared_experts + work.group - 1) : 1.0f;
  };
  uint4 gate_read[2], up_read[2];
  // Reads what exists in any case; what it reads for other columns is not used.
  auto fetch = [&](int i, const bf16* from, int slab) {
    from += slab * 32 + octet * 8 < columns ? slab * 32 : -octet * 8;
    gate_read[i] = load_16_shared_by_sms(from);
    up_read[i] = gated ? load_16_shared_by_sms(from + width) : uint4{0, 0, 0, 0};
  };
  fetch(0, z_of(row_of(0)), 0), fetch(1, z_of(row_of(0)), 1);
  float weight = weight_of(row_of(0));
#pragma unroll 1
  for (int eight = 0; eight / 2 * 64 < work.rows; ++eight) {
    const int row = row_of(eight);
    const bool row_there = row < work.rows;
    const bf16* const z_row = z_of(row);
    const float next_weight = weight_of(row_of(eight + 1));
#pragma unroll 1
    for (int slab = 0; slab < slabs; slab += 2) {
      float dot[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const std::uint32_t staging = warp.staging + i * 1024;
        with_constant<2 * all_slabs>(eight * (all_slabs / 2) + slab / 2, [&](auto constant) {
          constexpr int which = constant.value / (all_slabs / 2), pair = constant.value % (all_slabs / 2);
          deposit_float<N, which / 2, which % 2>(sums, (2 * pair + i) * 4, staging, lane);
        });
        numerics::ActivationValue<float> act[8];
        {
          const Words gate(gate_read[i]), up(up_read[i]);
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            act[2 * w] = numerics::activation<Kind>(parameters, gate.low(w), up.low(w));
            act[2 * w + 1] = numerics::activation<Kind>(parameters, gate.high(w), up.high(w));
          }
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) hold(act[j]);
        // The next step but one; after the last rows the tile's last one, for nothing.
        fetch(i, slab + 2 < slabs ? z_row : z_of(row_of(eight + 1)), slab + 2 < slabs ? slab + 2 + i : i);
        __syncwarp();
        float d[8];
        staged_floats(staging, lane / 4, octet, d);
        const int offset = (slab + i) * 32;
        const bool there = offset + octet * 8 < columns;
        Words d_gate(uint4{0, 0, 0, 0}), d_up(uint4{0, 0, 0, 0}), a(uint4{0, 0, 0, 0});
        dot[i] = 0.0f;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const auto &low = act[2 * w], &high = act[2 * w + 1];
          const std::uint32_t rounded = pack_bfloat16(low.value, high.value);
          dot[i] = fmaf(d[2 * w], low_bfloat16(rounded), dot[i]);
          dot[i] = fmaf(d[2 * w + 1], high_bfloat16(rounded), dot[i]);
          const float d_low = weight * d[2 * w], d_high = weight * d[2 * w + 1];
          d_gate.word[w] = pack_bfloat16(d_low * low.d_gate, d_high * high.d_gate);
          if (gated) d_up.word[w] = pack_bfloat16(d_low * low.d_up, d_high * high.d_up);
          a.word[w] = pack_bfloat16(weight * (after_down ? low_bfloat16(rounded) : low.value),
                                    weight * (after_down ? high_bfloat16(rounded) : high.value));
        }
        if (!there) dot[i] = 0.0f;
        if (there && row_there) {
          if (dz) {
            bf16* to = dz + (z_row + offset - z);  // it lies like z
            store_16(to, d_gate.all());
            if (gated) store_16(to + width, d_up.all());
          }
          if (activated) store_16(activated + (work.held_begin + row) * width + work.column + octet * 8 + offset, a.all());
        }
      }
      // The sum over 64 columns is that of their halves.
#pragma unroll
      for (int i = 0; i < 2; ++i) dot[i] += __shfl_xor_sync(~0u, dot[i], 1);
#pragma unroll
      for (int i = 0; i < 2; ++i) dot[i] += __shfl_xor_sync(~0u, dot[i], 2);
      if (octet == 0 && row_there && slab * 32 < columns) {
        dprob_of_row<Ranks>(work, tensors, row, (work.column + slab * 32) / 64) = dot[0] + dot[1];
      }
    }
    weight = next_weight;
  }
}

// y = p (W a + b): the bias has its share in dprob, unless p multiplies before it. All tiles of a row block, and both halves of
// each, have some of its rows.
template <bool Ranks>
__device__ __forceinline__ void bias_share_of_dprob(const PassData& data, const Work& work, const Warp& warp) {
  const schedule::Sizes& sizes = data.pass.sizes;
  const ExpertGroup& tensors = data.groups[work.group];
  if (!tensors.down_bias) return;
  const bool after_down = work.group > 0 || data.weight_after_down;
  const int lane = warp.lane;
  const std::int64_t hidden = sizes.hidden_size;
  const bf16* bias = tensors.down_bias.of(work.expert, hidden);
  const int parts = sizes.down_dgrad_tiles(work.slot) * cluster_blocks,
            part = work.column_block * cluster_blocks + static_cast<int>(cluster_rank());
  for (int row = warp.index * parts + part; row < work.rows; row += 4 * parts) {
    const bf16* dy = dy_of_row(data, work, work.packed_begin + row);
    float dot = 0.0f;
#pragma unroll 8
    for (std::int64_t c = lane * 8; after_down && c < hidden; c += 256) {
      float u[8], v[8];
      unpack(load_16_shared_by_sms(dy + c), u);
      unpack(load_16(bias + c), v);
      for (int j = 0; j < 8; ++j) dot += u[j] * v[j];
    }
    for (int distance = 16; distance > 0; distance /= 2) dot += __shfl_xor_sync(~0u, dot, distance);
    if (lane == 0) dprob_of_row<Ranks>(work, tensors, row, tensors.dprob_groups - 1) = dot;
  }
}

template <int N, bool Ranks>
__device__ __forceinline__ void activation_gradient(const PassData& data, const Sums<N>& sums, const Work& work,
                                                    const Warp& warp) {
  numerics::with_activation_kind(data.activation.kind, [&]<ActivationKind Kind>() {
    activation_gradient_of<Kind, N, Ranks>(data, sums, work, warp);
  });
  __syncwarp();
  bias_share_of_dprob<Ranks>(data, work, warp);
}

}  // namespace moelith::executors::cuda::sm90
