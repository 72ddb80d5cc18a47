// The blocked product, included by gemm_plain.cpp, gemm_avx2.cpp and gemm_avx512.cpp inside their anonymous namespace,
// so that each instruction set has its own copy with internal linkage and no code of a wider instruction set can be
// picked by the linker for a narrower machine. For the same reason there is nothing of the standard library in it.
//
// The including file provides, for T = float and double and for Storage = bfloat16, float and double:
//
//   Lanes<T>: Vector; width; zero(); load(p), store(p, v) without alignment; broadcast(p); fma(a, b, c) = a * b + c
//     max_rows, max_vectors: the largest register tile, max_rows x (max_vectors * width)
//   Pack<Storage>: lanes, steps;
//     transpose(rows, first, out, distance): out[s * distance + r] = rows[r][first + s], r < lanes, s < steps, stored
//       in ascending s
//     widen(in, out): out[r] = in[r], r < lanes
//   panel_bytes: of one packed panel of B (a good part of the first-level cache)
//   block_bytes: of the packed block of A (half of the second-level cache)
//
// How it runs: for each block of k, A's block is packed once into panels of up to max_rows rows; then B is packed one
// panel of columns at a time into the first-level cache, and every panel of A goes over it. So B, which dominates when
// m is small, is read once, converted once, and never written to memory outside the first-level cache. Between blocks
// of k the sums rest in C, which is exact.

template <class Storage>
struct Blocked {
  using T = numerics::accumulator_t<Storage>;
  using L = Lanes<T>;
  using P = Pack<Storage>;
  using Index = std::int64_t;
  using Kernel = void (*)(Index k, const T* a, const T* b, T* c, Index ldc, bool from_zero);

  static constexpr int max_rows = L::max_rows;
  static constexpr int width = L::width;
  // With few rows a tile is made wider, to have enough independent chains for the latency of fma.
  static constexpr int few_rows = 3;
  static constexpr int few_rows_vectors = 2 * L::max_vectors;
  static constexpr int max_columns = few_rows_vectors * width;
  static constexpr Index cache_line = 64;

  static Index smaller(Index x, Index y) { return x < y ? x : y; }
  static Index divide_up(Index x, Index y) { return (x + y - 1) / y; }

  static const Storage* vector(const Operand<Storage>& operand, Index v) {
    return operand.pointers ? operand.pointers[v] : operand.data + v * operand.stride;
  }

  // C[R, V * width] += A B over k steps. a: [k][R], b: [k][V * width].
  template <int R, int V>
  static void kernel(Index k, const T* a, const T* b, T* c, Index ldc, bool from_zero) {
    typename L::Vector sum[R][V];
    if (from_zero) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sum[r][v] = L::zero();
      }
    } else {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sum[r][v] = L::load(c + r * ldc + v * width);
      }
    }
    for (Index p = 0; p < k; ++p, a += R, b += V * width) {
      typename L::Vector column[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) column[v] = L::load(b + v * width);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const typename L::Vector row = L::broadcast(a + r);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sum[r][v] = L::fma(row, column[v], sum[r][v]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) L::store(c + r * ldc + v * width, sum[r][v]);
    }
  }

  template <int R, int V>
  static Kernel find_kernel(Index rows) {
    if (rows == R) return &kernel<R, V>;
    if constexpr (R > 1) return find_kernel<R - 1, V>(rows);
    return nullptr;
  }
  template <int V = few_rows_vectors>
  static Kernel find_kernel(Index rows, Index vectors) {
    if (vectors == V) return find_kernel<(V > L::max_vectors ? few_rows : max_rows), V>(rows);
    if constexpr (V > 1) return find_kernel<V - 1>(rows, vectors);
    return nullptr;
  }

  // Packs k steps (first ... first + k - 1) of the `count` rows from `begin` on: out[p * distance + r], r < distance,
  // with zeros for r >= count. Stores may run over by up to P::lanes - 1 elements, past a step into the next one (which
  // is written afterwards) and past the end of the panel: the caller leaves that room.
  // fixed_distance: the distance where it is known when this is compiled, otherwise 0.
  template <Index fixed_distance = 0>
  static void pack_k_contiguous(const Operand<Storage>& operand, Index begin, Index count, Index first, Index k,
                                Index any_distance, T* out) {
    const Index distance = fixed_distance ? fixed_distance : any_distance;
    static const Storage zeros[P::steps] = {};
    // The last group goes first: what it spills over lies where the first group writes later.
    for (Index group = (distance - 1) / P::lanes; group >= 0; --group) {
      const Storage* rows[P::lanes];
      bool present[P::lanes], all = true;
      for (Index r = 0; r < P::lanes; ++r) {
        const Index row = group * P::lanes + r;
        rows[r] = row < count ? vector(operand, begin + row) : nullptr;
        present[r] = rows[r] != nullptr;
        all = all && present[r];
        if (present[r]) rows[r] += first;
      }
      T* target = out + group * P::lanes;
      Index p = 0;
      if (all) {
        for (; p + P::steps <= k; p += P::steps) P::transpose(rows, p, target + p * distance, distance);
      } else {
        for (; p + P::steps <= k; p += P::steps) {
          const Storage* now[P::lanes];
          for (Index r = 0; r < P::lanes; ++r) now[r] = present[r] ? rows[r] + p : zeros;
          P::transpose(now, 0, target + p * distance, distance);
        }
      }
      if (p < k) {
        Storage rest[P::lanes][P::steps] = {};
        const Storage* now[P::lanes];
        for (Index r = 0; r < P::lanes; ++r) {
          now[r] = rest[r];
          if (present[r])
            for (Index s = 0; s < k - p; ++s) rest[r][s] = rows[r][p + s];
        }
        T wide[P::steps * P::lanes];
        P::transpose(now, 0, wide, P::lanes);
        for (Index s = 0; s < k - p; ++s)
          for (Index r = 0; r < P::lanes; ++r) target[(p + s) * distance + r] = wide[s * P::lanes + r];
      }
    }
  }

  // The same for vectors along the rows; `rows` is the length of the vectors.
  static void pack_row_contiguous(const Operand<Storage>& operand, Index begin, Index count, Index first, Index k,
                                  Index distance, T* out, Index rows) {
    // Reading on into the rows of the next panel is fine, past the end of the vector is not.
    const Index readable = count == distance ? rows - begin : count;
    const Index groups = divide_up(distance, P::lanes);
    if (readable >= groups * P::lanes) {
      if (groups == 1) return pack_row_groups<1>(operand, begin, first, k, distance, out);
      if (groups == 2) return pack_row_groups<2>(operand, begin, first, k, distance, out);
    }
    for (Index p = 0; p < k; ++p, out += distance) {
      const Storage* in = vector(operand, first + p);
      for (Index r = 0; r < distance; r += P::lanes) {
        if (in && r + P::lanes <= readable) {
          P::widen(in + begin + r, out + r);
        } else {
          for (Index lane = r; lane < smaller(distance, r + P::lanes); ++lane)
            out[lane] = in && lane < count ? numerics::load(in[begin + lane]) : T(0);
        }
      }
    }
  }

  template <int groups>
  static void pack_row_groups(const Operand<Storage>& operand, Index begin, Index first, Index k, Index distance,
                              T* out) {
    // Copies, since for all the compiler knows a vector store to `out` may change the operand.
    const Storage* const* const pointers = operand.pointers ? operand.pointers + first : nullptr;
    const Index stride = operand.stride;
    const Storage* in = pointers ? nullptr : operand.data + first * stride + begin;
    for (Index p = 0; p < k; ++p, out += distance) {
      if (pointers) {
        in = pointers[p];
        if (!in) {
          for (Index r = 0; r < distance; ++r) out[r] = T(0);
          continue;
        }
        in += begin;
      }
#pragma GCC unroll 4
      for (int group = 0; group < groups; ++group) P::widen(in + group * P::lanes, out + group * P::lanes);
      in += stride;
    }
  }

  // Rows are spread evenly over the panels of a block: 64 rows as 9 x 6 + 2 x 5 and not 10 x 6 + 4.
  struct Panels {
    Index count, low, tall;  // `tall` panels of low + 1 rows, then panels of low rows
    Panels(Index rows, Index most) : count(divide_up(rows, most)), low(rows / count), tall(rows % count) {}
    Index begin(Index i) const { return i * low + smaller(i, tall); }
    Index rows(Index i) const { return low + (i < tall ? 1 : 0); }
  };

  static void run(const Operand<Storage>& a, const Operand<Storage>& b, Index m, Index n, Index k, T* c, Index ldc,
                  bool accumulate, Scratch& scratch) {
    constexpr bool narrow = sizeof(Storage) < sizeof(T);
    const bool a_by_rows = a.order == Operand<Storage>::Order::row_contiguous;
    const bool b_by_rows = b.order == Operand<Storage>::Order::row_contiguous;

    const Index vectors = m <= few_rows ? few_rows_vectors : L::max_vectors;
    const Index columns = vectors * width;  // of a panel of B
    // Where a panel of B is narrower than a cache line of its rows, two are packed at a time.
    const Index b_panels = b_by_rows && narrow ? 2 : 1;

    const Index k_most = panel_bytes / (columns * Index(sizeof(T)));
    const Index k_block = smaller(divide_up(divide_up(k, divide_up(k, k_most)), 16) * 16, k_most);
    const Index m_most = divide_up(block_bytes / (k_block * Index(sizeof(T))), max_rows) * max_rows;
    const Panels blocks(m, smaller(m, m_most));

    const Index row_panel_room = divide_up(max_rows * k_block + P::lanes, 16) * 16;
    const Index column_panel_room = divide_up(columns * k_block + P::lanes, 16) * 16;
    const Index row_panels_most = divide_up(blocks.rows(0), max_rows);
    T* const packed_a =
        static_cast<T*>(scratch.reserve(sizeof(T) * (row_panels_most * row_panel_room + b_panels * column_panel_room)));
    T* const packed_b = packed_a + row_panels_most * row_panel_room;

    for (Index block = 0; block < blocks.count; ++block) {
      const Index i_begin = blocks.begin(block);
      const Panels panels(blocks.rows(block), max_rows);
      for (Index p = 0; p < k; p += k_block) {
        const Index depth = smaller(k_block, k - p);
        pack_a(a, a_by_rows, m, i_begin, panels, p, depth, packed_a, row_panel_room);
        Prefetch a_prefetch(a, a_by_rows, i_begin, i_begin + blocks.rows(block), p + depth,
                            smaller(k_block, k - p - depth));
        const Index a_lines = divide_up(a_prefetch.lines(), divide_up(n, columns) * panels.count);
        for (Index j = 0; j < n; j += columns * b_panels) {
          pack_b(b, b_by_rows, n, j, columns, b_panels, p, depth, packed_b, column_panel_room);
          const Index j_next = j + columns * b_panels;
          Prefetch b_prefetch = j_next < n
                                    ? Prefetch(b, b_by_rows, j_next, smaller(n, j_next + columns * b_panels), p, depth)
                                    : Prefetch(b, b_by_rows, 0, smaller(n, columns * b_panels), p + depth,
                                               smaller(k_block, k - p - depth));
          for (Index panel = 0; panel < b_panels && j + panel * columns < n; ++panel) {
            multiply_panel(panels, depth, packed_a, row_panel_room, packed_b + panel * column_panel_room,
                           smaller(columns, n - j - panel * columns), c + i_begin * ldc + j + panel * columns, ldc,
                           !accumulate && p == 0, b_prefetch, a_prefetch, a_lines);
          }
        }
      }
    }
  }

  // What is packed next is asked for while the present part is worked on, a few lines before each kernel call: its
  // vectors lie far apart and are short within a block, so the hardware does not foresee them.
  struct Prefetch {
    const Operand<Storage>& operand;
    Index vector_begin, vector_end, first, bytes, at;
    Prefetch(const Operand<Storage>& source, bool by_rows, Index row_begin, Index row_end, Index p, Index depth)
        : operand(source),
          vector_begin(by_rows ? p : row_begin),
          vector_end(depth > 0 ? (by_rows ? p + depth : row_end) : vector_begin),
          first(by_rows ? row_begin : p),
          bytes((by_rows ? row_end - row_begin : depth) * Index(sizeof(Storage))),
          at(0) {}
    void some(Index lines) {
      for (; lines > 0 && vector_begin < vector_end; --lines) {
        if (const Storage* v = vector(operand, vector_begin))
          __builtin_prefetch(reinterpret_cast<const char*>(v + first) + at, 0, 2);
        at += cache_line;
        if (at >= bytes) {
          at = 0;
          ++vector_begin;
        }
      }
    }
    Index lines() const { return (vector_end - vector_begin) * divide_up(bytes, cache_line); }
  };

  static void pack_a(const Operand<Storage>& a, bool by_rows, Index m, Index i_begin, const Panels& panels, Index p,
                     Index depth, T* out, Index room) {
    if (!by_rows) {
      for (Index i = 0; i < panels.count; ++i)
        pack_k_contiguous(a, i_begin + panels.begin(i), panels.rows(i), p, depth, panels.rows(i), out + i * room);
      return;
    }
    // A few vectors at a time over all panels, so that a cache line of them is used whole while it is there.
    constexpr Index few = 16;
    for (Index s = 0; s < depth; s += few) {
      for (Index i = 0; i < panels.count; ++i) {
        const Index rows = panels.rows(i);
        pack_row_contiguous(a, i_begin + panels.begin(i), rows, p + s, smaller(few, depth - s), rows,
                            out + i * room + s * rows, m);
      }
    }
  }

  static void pack_b(const Operand<Storage>& b, bool by_rows, Index n, Index j, Index columns, Index panels, Index p,
                     Index depth, T* out, Index room) {
    constexpr Index few = 16;
    const Index step = by_rows && panels > 1 ? few : depth;
    for (Index s = 0; s < depth; s += step) {
      for (Index panel = 0; panel < panels; ++panel) {
        const Index begin = j + panel * columns;
        if (begin >= n) break;
        const Index count = smaller(columns, n - begin);
        const Index distance = divide_up(count, width) * width;
        T* target = out + panel * room + s * distance;
        if (by_rows) {
          pack_row_contiguous(b, begin, count, p + s, smaller(step, depth - s), distance, target, n);
        } else {
          if (distance == L::max_vectors * width) {
            pack_k_contiguous<L::max_vectors * width>(b, begin, count, p, depth, distance, target);
          } else {
            pack_k_contiguous(b, begin, count, p, depth, distance, target);
          }
        }
      }
    }
  }

  // C[all rows of the block, count] += A B for one panel of B.
  static void multiply_panel(const Panels& panels, Index depth, const T* packed_a, Index room, const T* packed_b,
                             Index count, T* c, Index ldc, bool from_zero, Prefetch& b_prefetch, Prefetch& a_prefetch,
                             Index a_lines) {
    const Index vectors = divide_up(count, width);
    const bool whole = count == vectors * width;
    const Kernel low = find_kernel(panels.low, vectors);
    const Kernel tall = panels.tall ? find_kernel(panels.low + 1, vectors) : nullptr;
    const Index b_lines = divide_up(b_prefetch.lines(), panels.count);
    for (Index i = 0; i < panels.count; ++i) {
      const Kernel kernel = i < panels.tall ? tall : low;
      T* tile = c + panels.begin(i) * ldc;
      b_prefetch.some(b_lines);
      a_prefetch.some(a_lines);
      if (i + 1 < panels.count) {
        // The kernel begins by loading its part of C.
        const T* next = c + panels.begin(i + 1) * ldc;
        for (Index r = 0; r < panels.rows(i + 1); ++r, next += ldc) {
          __builtin_prefetch(next, 1, 3);
          __builtin_prefetch(next + count - 1, 1, 3);
        }
      }
      if (whole) {
        kernel(depth, packed_a + i * room, packed_b, tile, ldc, from_zero);
      } else {
        multiply_edge(kernel, depth, packed_a + i * room, packed_b, tile, panels.rows(i), count, ldc, from_zero);
      }
    }
  }

  // The last columns, where fewer than whole vectors of them exist: by way of a whole tile of our own.
  static void multiply_edge(Kernel kernel, Index depth, const T* a, const T* b, T* c, Index rows, Index count,
                            Index ldc, bool from_zero) {
    alignas(64) T tile[max_rows * max_columns] = {};
    if (!from_zero) {
      for (Index i = 0; i < rows; ++i)
        for (Index j = 0; j < count; ++j) tile[i * max_columns + j] = c[i * ldc + j];
    }
    kernel(depth, a, b, tile, max_columns, from_zero);
    for (Index i = 0; i < rows; ++i)
      for (Index j = 0; j < count; ++j) c[i * ldc + j] = tile[i * max_columns + j];
  }
};

constexpr GemmKernels all_kernels{&Blocked<numerics::bfloat16>::run, &Blocked<float>::run, &Blocked<double>::run};
