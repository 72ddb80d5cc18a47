// The tile product of bfloat16 on AMX (Sapphire Rapids and later), used only where it is asked for: its order of sums
// is another one than that of the fma kernels. For each step of 32 in k (the last one filled up with zeros), in order:
//
//   even = fma chain over the products of p = 0, 2, ..., 30 of the step, from 0;  odd = the same over p = 1, 3, ..., 31
//   C(i, j) = C(i, j) + (even + odd)
//
// in float, rounding to nearest, subnormal numbers taken and given as zero (Intel's manual, TDPBF16PS). That order,
// too, depends on nothing but k; a product split over k has the bits of the whole one if it is split at multiples
// of 32. Float and double go to the AVX-512 kernels.
#if defined(__x86_64__)

#include <immintrin.h>

#include "executors/cpu/gemm_kernels.hpp"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,amx-tile,amx-bf16"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,amx-tile,amx-bf16")
// The "undefined" pass-through operands within GCC 12's own intrinsics (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace moelith::executors::cpu {
namespace {

using Index = std::int64_t;
using Matrix = Operand<numerics::bfloat16>;
using numerics::bfloat16;

constexpr Index edge = 16;                // a tile of C is 16 x 16 floats
constexpr Index step = 32;                // of k, in one instruction
constexpr Index tile_bytes = 1024;        // 16 rows of 64 bytes, of any operand
constexpr Index k_most = 16 * step;       // B: two panels of 16 columns are 32 KiB
constexpr Index block_bytes = 512 << 10;  // of packed A, in a second-level cache of 2 MiB

Index smaller(Index x, Index y) { return x < y ? x : y; }
Index divide_up(Index x, Index y) { return (x + y - 1) / y; }

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

const bfloat16* vector(const Matrix& operand, Index v) {
  return operand.pointers ? operand.pointers[v] : operand.data + v * operand.stride;
}

// 128 bits of four lines, side by side.
__m512i four_lines(const char* line0) {
  constexpr Index four = 4 * 64;
  __m512i x = _mm512_castsi128_si512(_mm_load_si128(reinterpret_cast<const __m128i*>(line0)));
  x = _mm512_inserti32x4(x, _mm_load_si128(reinterpret_cast<const __m128i*>(line0 + four)), 1);
  x = _mm512_inserti32x4(x, _mm_load_si128(reinterpret_cast<const __m128i*>(line0 + 2 * four)), 2);
  return _mm512_inserti32x4(x, _mm_load_si128(reinterpret_cast<const __m128i*>(line0 + 3 * four)), 3);
}

// 16 x 16 words of 32 bits: out[q][i] = in[i][q].
void transpose_tile(const char* in, char* out) {
  for (Index quarter = 0; quarter < 4; ++quarter) {
    const char* column = in + 16 * quarter;
    const __m512i x0 = four_lines(column), x1 = four_lines(column + 64);
    const __m512i x2 = four_lines(column + 128), x3 = four_lines(column + 192);
    const __m512i low01 = _mm512_unpacklo_epi32(x0, x1), high01 = _mm512_unpackhi_epi32(x0, x1);
    const __m512i low23 = _mm512_unpacklo_epi32(x2, x3), high23 = _mm512_unpackhi_epi32(x2, x3);
    char* target = out + 4 * 64 * quarter;
    _mm512_store_si512(target, _mm512_unpacklo_epi64(low01, low23));
    _mm512_store_si512(target + 64, _mm512_unpackhi_epi64(low01, low23));
    _mm512_store_si512(target + 128, _mm512_unpacklo_epi64(high01, high23));
    _mm512_store_si512(target + 192, _mm512_unpackhi_epi64(high01, high23));
  }
}

__mmask32 first_lanes(Index count) { return count >= 32 ? 0xffffffffu : (1u << count) - 1u; }

// One tile: `count` rows from `begin`, `depth` steps of k from `first` (at most 16 and 32), zeros beyond.
// pairs_down = false (A): line i holds the 32 values of row i. true (B): line q holds, for each row, its values 2 q and
// 2 q + 1. One is the other's transpose in words of two values, and each order in memory gives one of them directly.
void pack_tile(const Matrix& operand, Index begin, Index count, Index first, Index depth, bool pairs_down, char* out) {
  const bool by_rows = operand.order == Matrix::Order::row_contiguous;
  alignas(64) char other[tile_bytes];
  char* lines = by_rows == pairs_down ? out : other;
  if (by_rows) {
    const __mmask16 rows = static_cast<__mmask16>(first_lanes(count));
    for (Index q = 0; q < edge; ++q) {
      const bfloat16* low = 2 * q < depth ? vector(operand, first + 2 * q) : nullptr;
      const bfloat16* high = 2 * q + 1 < depth ? vector(operand, first + 2 * q + 1) : nullptr;
      const __m256i zero = _mm256_setzero_si256();
      const __m256i low_values = low ? _mm256_maskz_loadu_epi16(rows, low + begin) : zero;
      const __m256i high_values = high ? _mm256_maskz_loadu_epi16(rows, high + begin) : zero;
      _mm512_store_si512(lines + 64 * q, _mm512_or_si512(_mm512_cvtepu16_epi32(low_values),
                                                         _mm512_slli_epi32(_mm512_cvtepu16_epi32(high_values), 16)));
    }
  } else {
    const __mmask32 steps = first_lanes(depth);
    for (Index i = 0; i < edge; ++i) {
      const bfloat16* row = i < count ? vector(operand, begin + i) : nullptr;
      _mm512_store_si512(lines + 64 * i, row ? _mm512_maskz_loadu_epi16(steps, row + first) : _mm512_setzero_si512());
    }
  }
  if (lines == other) transpose_tile(other, out);
}

// C[16 R, 16 V] += A B over `steps` steps. a, b: [steps][tile] for each of the R and V panels, `room` bytes apart.
template <int R, int V>
void multiply(Index steps, const char* a, Index a_room, const char* b, Index b_room, float* c, Index ldc,
              bool from_zero) {
  const Index c_bytes = ldc * Index(sizeof(float));
  // Tile registers 0 to 3: C; 4, 5: A; 6, 7: B.
  if (from_zero) {
    _tile_zero(0);
    if constexpr (V > 1) _tile_zero(1);
    if constexpr (R > 1) _tile_zero(2);
    if constexpr (R > 1 && V > 1) _tile_zero(3);
  } else {
    _tile_loadd(0, c, c_bytes);
    if constexpr (V > 1) _tile_loadd(1, c + edge, c_bytes);
    if constexpr (R > 1) _tile_loadd(2, c + edge * ldc, c_bytes);
    if constexpr (R > 1 && V > 1) _tile_loadd(3, c + edge * ldc + edge, c_bytes);
  }
  for (Index s = 0; s < steps; ++s, a += tile_bytes, b += tile_bytes) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (V > 1) {
      _tile_loadd(7, b + b_room, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (R > 1) {
      _tile_loadd(5, a + a_room, 64);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (V > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, c_bytes);
  if constexpr (V > 1) _tile_stored(1, c + edge, c_bytes);
  if constexpr (R > 1) _tile_stored(2, c + edge * ldc, c_bytes);
  if constexpr (R > 1 && V > 1) _tile_stored(3, c + edge * ldc + edge, c_bytes);
}

void multiply_some(Index rows, Index columns, Index steps, const char* a, Index a_room, const char* b, Index b_room,
                   float* c, Index ldc, bool from_zero) {
  // The last rows and columns go by way of a whole tile of our own.
  alignas(64) float whole[2 * edge * 2 * edge];
  const bool edges = rows % edge != 0 || columns % edge != 0;
  float* target = edges ? whole : c;
  const Index distance = edges ? 2 * edge : ldc;
  if (edges && !from_zero) {
    for (Index i = 0; i < 2 * edge; ++i)
      for (Index j = 0; j < 2 * edge; ++j) whole[i * 2 * edge + j] = i < rows && j < columns ? c[i * ldc + j] : 0.0f;
  }
  if (rows > edge) {
    if (columns > edge) {
      multiply<2, 2>(steps, a, a_room, b, b_room, target, distance, from_zero);
    } else {
      multiply<2, 1>(steps, a, a_room, b, b_room, target, distance, from_zero);
    }
  } else if (columns > edge) {
    multiply<1, 2>(steps, a, a_room, b, b_room, target, distance, from_zero);
  } else {
    multiply<1, 1>(steps, a, a_room, b, b_room, target, distance, from_zero);
  }
  if (edges) {
    for (Index i = 0; i < rows; ++i)
      for (Index j = 0; j < columns; ++j) c[i * ldc + j] = whole[i * 2 * edge + j];
  }
}

// Blocked as in gemm_blocked.inl: a block of A is packed once a block of k, B by panels of 32 columns.
void run(const Matrix& a, const Matrix& b, Index m, Index n, Index k, float* c, Index ldc, bool accumulate,
         Scratch& scratch) {
  const Index k_block = smaller(divide_up(k, step) * step, k_most);
  const Index room = k_block / step * tile_bytes;  // of 16 rows or columns
  const Index m_block = smaller(divide_up(m, 2 * edge), block_bytes / (2 * room)) * 2 * edge;
  char* const packed_a = static_cast<char*>(scratch.reserve((m_block / edge + 2) * room));
  char* const packed_b = packed_a + m_block / edge * room;

  const TileConfig config;
  _tile_loadconfig(&config);
  for (Index i = 0; i < m; i += m_block) {
    const Index rows = smaller(m_block, m - i);
    for (Index p = 0; p < k; p += k_block) {
      const Index depth = smaller(k_block, k - p), steps = divide_up(depth, step);
      for (Index r = 0; r < rows; r += edge)
        for (Index s = 0; s < steps; ++s)
          pack_tile(a, i + r, smaller(edge, rows - r), p + s * step, smaller(step, depth - s * step), false,
                    packed_a + r / edge * room + s * tile_bytes);
      for (Index j = 0; j < n; j += 2 * edge) {
        const Index columns = smaller(2 * edge, n - j);
        for (Index v = 0; v < columns; v += edge)
          for (Index s = 0; s < steps; ++s)
            pack_tile(b, j + v, smaller(edge, columns - v), p + s * step, smaller(step, depth - s * step), true,
                      packed_b + v / edge * room + s * tile_bytes);
        for (Index r = 0; r < rows; r += 2 * edge)
          multiply_some(smaller(2 * edge, rows - r), columns, steps, packed_a + r / edge * room, room, packed_b, room,
                        c + (i + r) * ldc + j, ldc, !accumulate && p == 0);
      }
    }
  }
  _tile_release();
}

}  // namespace

const GemmFunction<bfloat16> gemm_bfloat16_amx = &run;

}  // namespace moelith::executors::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__
