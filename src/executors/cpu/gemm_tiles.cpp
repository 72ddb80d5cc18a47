// Tiles around a matrix product, and the bias gradients.
#include <algorithm>

#include "executors/cpu/pass_data.hpp"
#include "schedule/tile_order.hpp"

namespace moelith::executors::cpu {
namespace {

using schedule::Direction;
using schedule::RowRange;
using schedule::Stage;
using schedule::Tile;

template <class Storage>
struct GemmTile {
  using T = numerics::accumulator_t<Storage>;
  using Matrix = Operand<Storage>;
  static constexpr auto along_k = Matrix::Order::k_contiguous;
  static constexpr auto along_rows = Matrix::Order::row_contiguous;

  const PassData<Storage>& data;
  const Tile& tile;
  WorkerMemory<Storage>& memory;
  const RowKernels<Storage>& kernels = row_kernels<Storage>();
  const schedule::Sizes& sizes = data.pass.sizes;
  const typename PassData<Storage>::Slot& slot = data.slots[tile.expert];
  const bool shared = sizes.is_shared(tile.expert);
  const std::int64_t hidden = sizes.hidden_size;
  const std::int64_t width = sizes.width(tile.expert);               // I of this expert
  const std::int64_t pre_width = sizes.gate_up_factor * width;       // F I
  const std::int64_t first_held = first_row_held(data.pass, tile);
  Storage* const pre_activation = tile.round == 0 ? slot.pre_activation : slot.later_pre_activation;

  // A row in a buffer of `columns` columns.
  template <class U>
  U* held(U* buffer, std::int64_t row, std::int64_t columns) const {
    return buffer + (row - first_held) * columns;
  }

  // Pointers to the rows [rows.begin, rows.end) of x or dY, shifted by `column`.
  const Storage* const* token_rows(RowRange rows, bool of_x, std::int64_t column, int list) {
    const Storage* own = of_x ? data.x : data.dy;
    const std::int64_t stride = of_x ? data.x_stride : data.dy_stride;
    auto& pointers = memory.pointers[list];
    pointers.resize(rows.size());
    if (shared) {
      for (std::int64_t i = 0; i < rows.size(); ++i) pointers[i] = own + (rows.begin + i) * stride + column;
      return pointers.data();
    }
    const Storage* received = of_x ? data.received_x : data.received_dy;
    for (std::int32_t r = 0; r < sizes.ranks; ++r) {
      const std::int64_t begin = std::max(rows.begin, data.pass.source_begin(tile.expert, r));
      const std::int64_t end = std::min(rows.end, data.pass.source_begin(tile.expert, r + 1));
      const bool mine = r == sizes.rank;
      const Storage* base = mine ? own : received + r * sizes.max_chunks * sizes.chunk_tokens * hidden;
      for (std::int64_t row = begin; row < end; ++row) {
        const std::int64_t token = data.pass.layout.row_route[row] / sizes.top_k;
        pointers[row - rows.begin] = base + token * (mine ? stride : hidden) + column;
      }
    }
    return pointers.data();
  }

  T* product(std::int64_t m, std::int64_t n) { return static_cast<T*>(memory.product.reserve(m * n * sizeof(T))); }

  // Where a row's columns of H go for its token: the slot of its route at its rank, or the shared expert's row.
  Storage* destination(std::int64_t row, std::int32_t& rank, std::int64_t column) const {
    if (shared) return data.shared_rows[tile.expert - sizes.local_experts] + row * hidden + column;
    while (row >= data.pass.source_begin(tile.expert, rank + 1)) ++rank;
    return data.route_rows[rank] + std::int64_t(data.pass.layout.row_route[row]) * hidden + column;
  }

  void gate_up() {
    const RowRange rows = tile_rows(data.pass, tile);
    const std::int64_t m = rows.size(), column = tile.column_block * std::int64_t(sizes.gate_up_columns());
    const std::int64_t n = std::min<std::int64_t>(sizes.gate_up_columns(), width - column);
    const bool gated = sizes.gate_up_factor == 2;
    // Gate columns, then the up columns that belong to them.
    auto& weights = memory.pointers[1];
    weights.resize(sizes.gate_up_factor * n);
    for (std::int64_t i = 0; i < n; ++i) {
      weights[i] = slot.gate_up_proj + (column + i) * hidden;
      if (gated) weights[n + i] = weights[i] + width * hidden;
    }
    const std::int64_t ld = sizes.gate_up_factor * n;
    T* pre = product(m, ld);
    gemm(Matrix::gathered(along_k, token_rows(rows, true, 0, 0)), Matrix::gathered(along_k, weights.data()), m, ld, hidden,
         pre, ld, false, memory.scratch);
    const bool forward = sizes.direction == Direction::forward;
    const bool weighted = !data.weight_after_down(tile.expert);
    for (std::int64_t i = 0; i < m; ++i) {
      const std::int64_t row = rows.begin + i;
      Storage* z = pre_activation ? held(pre_activation, row, pre_width) + column : nullptr;
      const Storage* bias = slot.gate_up_bias ? slot.gate_up_bias + column : nullptr;
      if (!forward) {  // made again: the pre-activation alone
        kernels.store(pre + i * ld, bias, z, n);
        if (gated) kernels.store(pre + i * ld + n, bias ? bias + width : nullptr, z + width, n);
        continue;
      }
      kernels.activate(data.activation,
                       {pre + i * ld, pre + i * ld + n, bias, bias ? bias + width : nullptr, z, z ? z + width : nullptr,
                        held(slot.activated, row, width) + column, weighted ? data.weight(tile.expert, row) : T(1)},
                       n);
    }
  }

  // out[rows, H tile] = left[rows, k] * right, into the tokens' slots.
  void rows_to_slots(Storage* left, std::int64_t k, const Matrix& right, const Storage* bias) {
    const RowRange rows = tile_rows(data.pass, tile);
    const std::int64_t column = tile.column_block * std::int64_t(sizes.tile.columns);
    const std::int64_t n = std::min<std::int64_t>(sizes.tile.columns, hidden - column);
    T* sum = product(rows.size(), n);
    gemm(Matrix::strided(along_k, held(left, rows.begin, k), k), right, rows.size(), n, k, sum, n, false, memory.scratch);
    std::int32_t rank = 0;
    for (std::int64_t i = 0; i < rows.size(); ++i) {
      kernels.store(sum + i * n, bias ? bias + column : nullptr, destination(rows.begin + i, rank, column), n);
    }
  }
  void down() {
    const std::int64_t column = tile.column_block * std::int64_t(sizes.tile.columns);
    rows_to_slots(slot.activated, width, Matrix::strided(along_k, slot.down_proj + column * width, width), slot.down_bias);
  }
  void gate_up_dgrad() {
    const std::int64_t column = tile.column_block * std::int64_t(sizes.tile.columns);
    rows_to_slots(slot.d_pre_activation, pre_width, Matrix::strided(along_rows, slot.gate_up_proj + column, hidden), nullptr);
  }

  void down_dgrad() {
    const RowRange rows = tile_rows(data.pass, tile);
    const std::int64_t m = rows.size(), column = tile.column_block * std::int64_t(sizes.down_dgrad_columns());
    const std::int64_t n = std::min<std::int64_t>(sizes.down_dgrad_columns(), width - column);
    T* d_a = product(m, n);
    const Storage* const* dy = token_rows(rows, false, 0, 0);
    gemm(Matrix::gathered(along_k, dy), Matrix::strided(along_rows, slot.down_proj + column, width), m, n, hidden, d_a, n,
         false, memory.scratch);
    const std::int64_t groups = data.dprob_groups(tile.expert);
    const bool after_down = data.weight_after_down(tile.expert);
    std::int32_t rank = 0;
    for (std::int64_t i = 0; i < m; ++i) {
      const std::int64_t row = rows.begin + i;
      T* dprob;
      if (shared) {
        dprob = data.shared_dprob[tile.expert - sizes.local_experts] + row * groups;
      } else {
        while (row >= data.pass.source_begin(tile.expert, rank + 1)) ++rank;
        dprob = data.route_dprob[rank] + data.pass.layout.row_route[row] * groups;
      }
      const Storage* z = held(pre_activation, row, pre_width) + column;
      Storage* dz = slot.d_pre_activation ? held(slot.d_pre_activation, row, pre_width) + column : nullptr;
      kernels.activate_backward(data.activation,
                                {d_a + i * n, z, z + width, dz, dz ? dz + width : nullptr,
                                 slot.activated ? held(slot.activated, row, width) + column : nullptr,
                                 dprob + column / sum_group, data.weight(tile.expert, row), after_down},
                                n);
      // y = p (W a + b): the bias has its share in dprob, unless p multiplies before it.
      if (slot.down_bias && tile.column_block == 0) {
        dprob[groups - 1] = after_down ? kernels.dot(dy[i], slot.down_bias, hidden) : T(0);
      }
    }
  }

  // The [m, n] piece of a weight's or bias's gradient [.., ld] that a tile sums, from row i and column j on.
  struct Piece {
    std::int64_t i, j, m, n, ld;
    std::int64_t place(std::int64_t row) const { return (i + row) * ld + j; }
  };
  using Target = typename PassData<Storage>::Slot::Target;
  using Sums = typename PassData<Storage>::Sums;
  using SetAside = T* Sums::*;  // where sums of this kind lie between two rounds

  // What the rounds before this one have summed; false, and nothing is there, if the expert's rows begin in this round.
  bool take_up(SetAside kind, RowRange rows, const Piece& piece, T* sum) const {
    if (rows.begin == data.pass.expert_rows(tile.expert).begin) return false;
    const T* from = data.sums[schedule::sum_place(tile.round - 1)].*kind;
    for (std::int64_t row = 0; row < piece.m; ++row) std::copy_n(from + piece.place(row), piece.n, sum + row * piece.n);
    return true;
  }
  // Into the caller's tensor, or set aside if the expert's rows go on in the next round.
  void store_gradient(const Target& target, SetAside kind, RowRange rows, const Piece& piece, const T* sum) {
    const bool complete = rows.end == data.pass.expert_rows(tile.expert).end;
    for (std::int64_t row = 0; row < piece.m; ++row) {
      const T* values = sum + row * piece.n;
      if (complete) {
        char* out = static_cast<char*>(target.data) + piece.place(row) * std::int64_t(size_of(target.dtype));
        kernels.store_gradient(values, out, target.dtype, target.accumulate, piece.n);
      } else {
        std::copy_n(values, piece.n, data.sums[schedule::sum_place(tile.round)].*kind + piece.place(row));
      }
    }
  }

  // One tile of a weight gradient [rows_of_weight, columns_of_weight]: the sum over the expert's rows of left^T right, as
  // far as the round has them.
  // left(rows, i), right(rows, j): these operands from weight row i, weight column j on.
  template <class Left, class Right>
  void weight_gradient(const Target& target, SetAside kind, std::int64_t rows_of_weight, std::int64_t columns_of_weight,
                       Left left, Right right) {
    const RowRange rows = summed_rows(data.pass, tile);
    if (!target.data || (rows.size() == 0 && target.accumulate)) return;
    const std::int64_t i = tile.row_block * sizes.tile.wgrad_rows;
    const std::int64_t j = tile.column_block * std::int64_t(sizes.tile.wgrad_columns);
    const std::int64_t m = std::min<std::int64_t>(sizes.tile.wgrad_rows, rows_of_weight - i);
    const std::int64_t n = std::min<std::int64_t>(sizes.tile.wgrad_columns, columns_of_weight - j);
    const Piece piece{i, j, m, n, columns_of_weight};
    T* sum = product(m, n);
    const bool goes_on = take_up(kind, rows, piece, sum);
    gemm(left(rows, i), right(rows, j), m, n, rows.size(), sum, n, goes_on, memory.scratch);
    store_gradient(target, kind, rows, piece, sum);
  }
  void gate_up_wgrad() {
    weight_gradient(
        slot.gate_up_grad, &Sums::gate_up, pre_width, hidden,
        [&](RowRange rows, std::int64_t i) {
          return Matrix::strided(along_rows, held(slot.d_pre_activation, rows.begin, pre_width) + i, pre_width);
        },
        [&](RowRange rows, std::int64_t j) { return Matrix::gathered(along_rows, token_rows(rows, true, j, 1)); });
  }
  void down_wgrad() {
    weight_gradient(
        slot.down_grad, &Sums::down, hidden, width,
        [&](RowRange rows, std::int64_t i) { return Matrix::gathered(along_rows, token_rows(rows, false, i, 0)); },
        [&](RowRange rows, std::int64_t j) {
          return Matrix::strided(along_rows, held(slot.activated, rows.begin, width) + j, width);
        });
  }

  // Sum over the expert's rows, 64 at a time from its first, then over those sums in order. A round ends between two row
  // blocks, which are whole groups.
  template <class Row>
  void bias_gradient(const Target& target, SetAside kind, std::int64_t columns, Row row) {
    if (!target.data) return;
    const RowRange rows = summed_rows(data.pass, tile);
    T* total = product(2, columns);
    T* group = total + columns;
    const Piece piece{0, 0, 1, columns, columns};
    if (!take_up(kind, rows, piece, total)) std::fill_n(total, columns, T(0));
    for (std::int64_t begin = rows.begin; begin < rows.end; begin += sum_group) {
      std::fill_n(group, columns, T(0));
      for (std::int64_t r = begin; r < std::min(begin + sum_group, rows.end); ++r) row(r, group);
      for (std::int64_t i = 0; i < columns; ++i) total[i] += group[i];
    }
    store_gradient(target, kind, rows, piece, total);
  }
  void gate_up_bias_grad() {
    bias_gradient(slot.gate_up_bias_grad, &Sums::gate_up_bias, pre_width, [&](std::int64_t row, T* sum) {
      kernels.add_scaled(T(1), held(slot.d_pre_activation, row, pre_width), sum, pre_width);
    });
  }
  void down_bias_grad() {
    const RowRange rows = summed_rows(data.pass, tile);
    const Storage* const* dy = token_rows(rows, false, 0, 0);
    const bool after_down = data.weight_after_down(tile.expert);
    bias_gradient(slot.down_bias_grad, &Sums::down_bias, hidden, [&](std::int64_t row, T* sum) {
      kernels.add_scaled(after_down ? data.weight(tile.expert, row) : T(1), dy[row - rows.begin], sum, hidden);
    });
  }
};

}  // namespace

template <class Storage>
void run_gemm_tile(const PassData<Storage>& data, const Tile& tile, WorkerMemory<Storage>& memory) {
  GemmTile<Storage> work{data, tile, memory};
  switch (tile.stage) {
    case Stage::gate_up: return work.gate_up();
    case Stage::down: return work.down();
    case Stage::down_dgrad: return work.down_dgrad();
    case Stage::gate_up_dgrad: return work.gate_up_dgrad();
    case Stage::gate_up_wgrad: return work.gate_up_wgrad();
    case Stage::down_wgrad: return work.down_wgrad();
    case Stage::gate_up_bias_grad: return work.gate_up_bias_grad();
    case Stage::down_bias_grad: return work.down_bias_grad();
    default: return;  // the stages of rank_tiles.cpp and combine_tiles.cpp
  }
}

template void run_gemm_tile(const PassData<numerics::bfloat16>&, const Tile&, WorkerMemory<numerics::bfloat16>&);
template void run_gemm_tile(const PassData<float>&, const Tile&, WorkerMemory<float>&);
template void run_gemm_tile(const PassData<double>&, const Tile&, WorkerMemory<double>&);

}  // namespace moelith::executors::cpu
