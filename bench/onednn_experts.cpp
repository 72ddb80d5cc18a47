// The matrix products of the routed experts, forward and backward, by oneDNN in a loop over experts: what
// bench/cpu_layer.py compares the layer with.
//
//   bench_onednn_experts H I threads seconds count...      count: rows of each expert
//
// For an expert of m rows:
//   forward    [m, H] x [2I, H]^T, [m, I] x [H, I]^T
//   backward   [m, H] x [H, I], [m, 2I] x [2I, H], and the weight gradients [2I, m] x [m, H], [H, m] x [m, I]
// Nothing else: no gather, activation, combine or routing. In bfloat16, and in float32: a processor without bfloat16
// instructions has the first at no better speed than the second, and oneDNN may have it not at all or as plain loops.
// Prints one line of JSON: {"bfloat16": {"forward_ms", "forward_backward_ms", "implementation"}, "float32": {...}};
// "bfloat16" is null where oneDNN has no code for it but plain loops.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include <dnnl.hpp>

#include "numerics/bfloat16.hpp"

extern "C" void omp_set_num_threads(int) __attribute__((weak));

namespace {

using dnnl::memory;
using Dims = memory::dims;

dnnl::engine& engine() {
  static dnnl::engine cpu(dnnl::engine::kind::cpu, 0);
  return cpu;
}
dnnl::stream& stream() {
  static dnnl::stream s(engine());
  return s;
}


std::vector<char> random_matrix(std::int64_t elements, memory::data_type type, std::uint64_t seed, float scale) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> table(4099);
  for (float& value : table) value = normal(random);
  const bool narrow = type == memory::data_type::bf16;
  std::vector<char> storage(static_cast<std::size_t>(elements) * (narrow ? 2 : 4));
  for (std::int64_t i = 0; i < elements; ++i) {
    const float value = table[static_cast<std::size_t>((i * 31 + i / 4099) % 4099)];
    if (narrow) {
      reinterpret_cast<moelith::numerics::bfloat16*>(storage.data())[i] = moelith::numerics::to_bfloat16(value);
    } else {
      reinterpret_cast<float*>(storage.data())[i] = value;
    }
  }
  return storage;
}

// oneDNN has nothing but its plain loops for this processor: hundreds of times too slow to be a rival.
struct OnlyReferenceCode {};

// One product C = A B of fixed shape and layout, made once for each number of rows.
struct Product {
  dnnl::matmul primitive;
  std::string implementation;
};
Product make_product(const memory& a, const memory& b, const memory& c) {
  const dnnl::matmul::primitive_desc descriptor(dnnl::matmul::desc(a.get_desc(), b.get_desc(), c.get_desc()), engine());
  if (std::string(descriptor.impl_info_str()).find("ref") == 0) throw OnlyReferenceCode{};
  return {dnnl::matmul(descriptor), descriptor.impl_info_str()};
}

class Experts {
 public:
  Experts(std::int64_t h, std::int64_t i, const std::vector<std::int64_t>& counts, memory::data_type type)
      : h_(h), i_(i), counts_(counts), type_(type) {
    std::int64_t rows = 0;
    for (std::int64_t count : counts) rows += count;
    const auto experts = static_cast<std::int64_t>(counts.size());
    x_ = random_matrix(rows * h, type, 1, 1.0f);
    z_ = random_matrix(rows * 2 * i, type, 2, 1.0f);
    a_ = random_matrix(rows * i, type, 3, 1.0f);
    y_ = random_matrix(rows * h, type, 4, 1.0f);
    gate_up_ = random_matrix(experts * 2 * i * h, type, 5, 0.02f);
    down_ = random_matrix(experts * h * i, type, 6, 0.03f);
    d_gate_up_.resize(gate_up_.size());
    d_down_.resize(down_.size());
  }

  void forward() {
    std::int64_t row = 0;
    for (std::size_t e = 0; e < counts_.size(); row += counts_[e++]) {
      const std::int64_t m = counts_[e];
      if (m == 0) continue;
      multiply({&x_, row * h_, m, h_, false}, {&gate_up_, std::int64_t(e) * 2 * i_ * h_, 2 * i_, h_, true}, {&z_, row * 2 * i_, m, 2 * i_, false});
      multiply({&a_, row * i_, m, i_, false}, {&down_, std::int64_t(e) * h_ * i_, h_, i_, true}, {&y_, row * h_, m, h_, false});
    }
    stream().wait();
  }
  void backward() {
    std::int64_t row = 0;
    for (std::size_t e = 0; e < counts_.size(); row += counts_[e++]) {
      const std::int64_t m = counts_[e], w = std::int64_t(e) * h_ * i_;
      if (m == 0) continue;
      multiply({&y_, row * h_, m, h_, false}, {&down_, w, h_, i_, false}, {&a_, row * i_, m, i_, false});
      multiply({&z_, row * 2 * i_, m, 2 * i_, false}, {&gate_up_, 2 * w, 2 * i_, h_, false}, {&x_, row * h_, m, h_, false});
      multiply({&z_, row * 2 * i_, m, 2 * i_, true}, {&x_, row * h_, m, h_, false}, {&d_gate_up_, 2 * w, 2 * i_, h_, false});
      multiply({&y_, row * h_, m, h_, true}, {&a_, row * i_, m, i_, false}, {&d_down_, w, h_, i_, false});
    }
    stream().wait();
  }
  const std::string& implementation() const { return implementation_; }

 private:
  struct Part {
    std::vector<char>* storage;
    std::int64_t first, rows, columns;
    bool transposed;
  };
  memory at(const Part& part) const {
    const Dims dims = part.transposed ? Dims{part.columns, part.rows} : Dims{part.rows, part.columns};
    const Dims strides = part.transposed ? Dims{1, part.columns} : Dims{part.columns, 1};
    const std::int64_t element = type_ == memory::data_type::bf16 ? 2 : 4;
    return memory(memory::desc(dims, type_, strides), engine(), part.storage->data() + part.first * element);
  }

  void multiply(const Part& a, const Part& b, const Part& c) { execute(at(a), at(b), at(c)); }
  static std::string key(std::initializer_list<memory> parts) {
    std::string text;
    for (const memory& part : parts) {
      const auto d = part.get_desc();
      text += std::to_string(d.dims()[0]) + "," + std::to_string(d.dims()[1]) + "," + std::to_string(d.data.format_desc.blocking.strides[0]) +
              "," + std::to_string(static_cast<int>(d.data_type())) + ";";
    }
    return text;
  }
  void execute(const memory& a, const memory& b, const memory& c) {
    const std::string name = key({a, b, c});
    auto found = products_.find(name);
    if (found == products_.end()) {
      found = products_.emplace(name, make_product(a, b, c)).first;
      implementation_ = found->second.implementation;
    }
    found->second.primitive.execute(stream(), {{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, b}, {DNNL_ARG_DST, c}});
  }
  const std::int64_t h_, i_;
  const std::vector<std::int64_t> counts_;
  const memory::data_type type_;
  std::vector<char> x_, z_, a_, y_, gate_up_, down_, d_gate_up_, d_down_;
  std::unordered_map<std::string, Product> products_;
  std::string implementation_;
};

double milliseconds(const std::chrono::steady_clock::duration& time) {
  return std::chrono::duration<double, std::milli>(time).count();
}

std::string measure(std::int64_t h, std::int64_t i, const std::vector<std::int64_t>& counts, memory::data_type type, double seconds) {
  Experts experts(h, i, counts, type);
  std::vector<double> forward, both;
  const auto start = std::chrono::steady_clock::now();
  for (int n = 0; n < 2 || milliseconds(std::chrono::steady_clock::now() - start) < seconds * 1e3; ++n) {
    const auto begin = std::chrono::steady_clock::now();
    experts.forward();
    const auto middle = std::chrono::steady_clock::now();
    experts.backward();
    const auto end = std::chrono::steady_clock::now();
    if (n == 0) continue;  // makes the primitives
    forward.push_back(milliseconds(middle - begin));
    both.push_back(milliseconds(end - begin));
  }
  std::sort(forward.begin(), forward.end());
  std::sort(both.begin(), both.end());
  char text[256];
  std::snprintf(text, sizeof text, "{\"forward_ms\": %.3f, \"forward_backward_ms\": %.3f, \"implementation\": \"%s\"}",
                forward[forward.size() / 2], both[both.size() / 2], experts.implementation().c_str());
  return text;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6) {
    std::fprintf(stderr, "usage: %s H I threads seconds count...\n", argv[0]);
    return 2;
  }
  const std::int64_t h = std::atoll(argv[1]), i = std::atoll(argv[2]);
  if (omp_set_num_threads) omp_set_num_threads(std::atoi(argv[3]));
  const double seconds = std::atof(argv[4]);
  std::vector<std::int64_t> counts;
  for (int n = 5; n < argc; ++n) counts.push_back(std::atoll(argv[n]));
  const std::string wide = measure(h, i, counts, memory::data_type::f32, seconds);
  std::string native = "null";
  try {
    native = measure(h, i, counts, memory::data_type::bf16, seconds);
  } catch (const OnlyReferenceCode&) {
  } catch (const dnnl::error&) {  // not even that
  }
  std::printf("{\"bfloat16\": %s, \"float32\": %s}\n", native.c_str(), wide.c_str());
}
