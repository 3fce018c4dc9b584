// Ragged groups of rows, each times a matrix of its own, on a CPU.
//
// A tile of the result stays in registers while the inner dimension passes by. Before that both
// operands are copied ("packed") into the order in which tiles read them, as in Goto and van de Geijn
// 2008, "Anatomy of High-Performance Matrix Multiplication". Ours differs in two things: only rows that
// a group has are computed, and as few of them share a matrix, the part of it that comes next is fetched
// from memory while a tile is computed. Each number is one sum in one order, whatever the threads.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#if defined(__AVX__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;

#if defined(__AVX512F__)
constexpr int kLanes = 16, kTileRows = 14;  // sums take 28 of 32 registers
#elif defined(__AVX__)
constexpr int kLanes = 8, kTileRows = 6;  // 12 of 16
#elif defined(__aarch64__)
constexpr int kLanes = 4, kTileRows = 12;  // 24 of 32
#else
constexpr int kLanes = 4, kTileRows = 4;  // 8 of 16
#endif
static_assert(kTileRows <= kLanes || kTileRows % kLanes == 0, "or Pack overwrites what it wrote");
constexpr int kTileCols = 2 * kLanes;
constexpr int kFewRows = 8;            // up to here reading the matrix takes longer than the products
constexpr int64_t kInner = 512;        // how much of the inner dimension is packed at a time
constexpr int64_t kTaskTiles = 20;     // one above another: with kInner, half of a second-level cache
constexpr int64_t kTaskCols = 2048;    // at most
constexpr size_t kLarge = 32 << 20;    // bytes: more than caches hold
constexpr int64_t kLine = 64 / sizeof(float);

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef float UnalignedVec
    __attribute__((vector_size(kLanes * sizeof(float)), aligned(sizeof(float)), may_alias));

inline Vec Load(const float* from) { return *reinterpret_cast<const UnalignedVec*>(from); }
inline void Store(float* to, Vec v) { *reinterpret_cast<UnalignedVec*>(to) = v; }

// Stores past the caches where the processor can.
inline void Stream(float* to, Vec v) {
  if (reinterpret_cast<uintptr_t>(to) % sizeof(Vec) != 0) return Store(to, v);
#if defined(__AVX512F__)
  _mm512_stream_ps(to, v);
#elif defined(__AVX__)
  _mm256_stream_ps(to, v);
#else
  Store(to, v);
#endif
}

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// `total` in `count` nearly equal parts: where part i begins, and part i - 1 ends.
inline int64_t Begin(int64_t i, int64_t total, int64_t count) { return i * total / count; }

// A factor of a product, seen from the tiles: its strides along their edge and along the inner
// dimension, one of which is 1.
struct Operand {
  const float* data;
  int64_t along_edge, along_inner;

  Operand At(int64_t edge, int64_t inner) const {
    return {data + edge * along_edge + inner * along_inner, along_edge, along_inner};
  }
};

// Lane kFirst of a, of b, the next of a, of b, ...
template <int kFirst, int... i>
inline Vec Interleave(Vec a, Vec b, std::integer_sequence<int, i...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (kFirst + i / 2 + i % 2 * kLanes)...);
#else
  typedef int Indices __attribute__((vector_size(kLanes * sizeof(int))));
  return __builtin_shuffle(a, b, Indices{(kFirst + i / 2 + i % 2 * kLanes)...});
#endif
}

inline void Transpose(Vec (&v)[kLanes]) {
  constexpr auto kIndices = std::make_integer_sequence<int, kLanes>();
  for (int width = 1; width < kLanes; width *= 2) {
    Vec next[kLanes];
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = Interleave<0>(v[i], v[i + kLanes / 2], kIndices);
      next[2 * i + 1] = Interleave<kLanes / 2>(v[i], v[i + kLanes / 2], kIndices);
    }
    std::copy(next, next + kLanes, v);
  }
}

// to[k, i] = from(i, k), [inner, kWidth], with zeros for i >= edge. May write kLanes past the end.
template <int kWidth>
void Pack(Operand from, int64_t edge, int64_t inner, float* to) {
  int64_t k = 0;
  if (from.along_edge != 1) {
    for (; k + kLanes <= inner; k += kLanes) {
      for (int first = 0; first < kWidth; first += kLanes) {
        Vec v[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          v[i] = first + i < edge ? Load(from.At(first + i, k).data) : Vec{};
        }
        Transpose(v);
        for (int j = 0; j < kLanes; ++j) Store(to + (k + j) * kWidth + first, v[j]);
      }
    }
  }
  for (; k < inner; ++k) {
    const Operand line = from.At(0, k);
    if (edge == kWidth && from.along_edge == 1) {
      std::copy(line.data, line.data + kWidth, to + k * kWidth);
    } else {
      for (int i = 0; i < kWidth; ++i) to[k * kWidth + i] = i < edge ? *line.At(i, 0).data : 0.0f;
    }
  }
}

// Lines of memory to fetch during a tile, one with each step of the inner dimension.
struct Fetch {
  const float* line;
  int64_t step, jump;  // to the next line, and after every 32nd

  // Half of the panel [kTileCols, kInner] of an operand.
  static Fetch HalfOf(Operand panel, int64_t half) {
    if (panel.along_edge == 1) {
      return {panel.At(half * kLine, 0).data, panel.along_inner, panel.along_inner};
    }
    const int64_t back_to_first = kLine - 31 * panel.along_edge;
    return {panel.At(0, half * kInner / 2).data, panel.along_edge, back_to_first};
  }
};

enum class Write { kSet, kAdd, kStream };

// c[kRows, cols] = a b, or adds it, of packed a and b.
template <int kRows>
void Tile(const float* a, const float* b, int64_t inner, Fetch fetch, Write write, float* c,
          int64_t stride, int64_t cols) {
  if (write != Write::kStream) {
    for (int r = 0; r < kRows; ++r) {
      __builtin_prefetch(c + r * stride, 1);
      __builtin_prefetch(c + r * stride + kLanes, 1);
    }
  }
  Vec sum[kRows][2] = {};
  for (int64_t k = 0; k < inner; ++k, a += kTileRows, b += kTileCols) {
    __builtin_prefetch(fetch.line, 0, 2);
    fetch.line += k % 32 == 31 ? fetch.jump : fetch.step;
    const Vec left = Load(b), right = Load(b + kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      sum[r][0] += a[r] * left;
      sum[r][1] += a[r] * right;
    }
  }
  const bool add = write == Write::kAdd;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r, c += stride) {
    if (cols < kTileCols) {
      float row[kTileCols];
      Store(row, sum[r][0]);
      Store(row + kLanes, sum[r][1]);
      for (int64_t j = 0; j < cols; ++j) c[j] = add ? c[j] + row[j] : row[j];
    } else if (write == Write::kStream) {
      Stream(c, sum[r][0]);
      Stream(c + kLanes, sum[r][1]);
    } else {
      Store(c, add ? Load(c) + sum[r][0] : sum[r][0]);
      Store(c + kLanes, add ? Load(c + kLanes) + sum[r][1] : sum[r][1]);
    }
  }
}

template <int... i>
auto TileOf(int64_t num_rows, std::integer_sequence<int, i...>) {
  static constexpr decltype(&Tile<1>) kTiles[] = {Tile<i + 1>...};
  return kTiles[num_rows - 1];
}

// Room for packed operands, one for each thread.
float* Scratch(int64_t size) {
  thread_local std::vector<float> scratch;
  if (static_cast<int64_t>(scratch.size()) < size + kLine) scratch.resize(size + kLine);
  const auto address = reinterpret_cast<uintptr_t>(scratch.data()) / sizeof(float);
  return scratch.data() + (kLine - address % kLine) % kLine;
}

// c[rows, cols] = a b.
void Product(int64_t rows, int64_t cols, int64_t inner, Operand a, Operand b, Write write, float* c,
             int64_t stride) {
  const int64_t num_tiles = CeilDiv(rows, kTileRows), depth = std::min(inner, kInner);
  const int64_t size_a = CeilDiv(num_tiles * kTileRows * depth + kLanes, kLine) * kLine;
  float* packed_a = Scratch(size_a + kTileCols * depth + kLanes);
  float* packed_b = packed_a + size_a;
  for (int64_t k = 0; k < inner; k += depth, write = Write::kAdd) {
    const int64_t now = std::min(depth, inner - k);
    for (int64_t t = 0; t < num_tiles; ++t) {
      const int64_t row = Begin(t, rows, num_tiles), edge = Begin(t + 1, rows, num_tiles) - row;
      Pack<kTileRows>(a.At(row, k), edge, now, packed_a + t * kTileRows * now);
    }
    for (int64_t col = 0; col < cols; col += kTileCols) {
      const int64_t width = std::min<int64_t>(kTileCols, cols - col);
      Pack<kTileCols>(b.At(col, k), width, now, packed_b);
      const bool last = col + kTileCols >= cols;
      const Operand next = last ? b.At(0, std::min(k + now, inner - 1)) : b.At(col + kTileCols, k);
      for (int64_t t = 0; t < num_tiles; ++t) {
        const int64_t row = Begin(t, rows, num_tiles), edge = Begin(t + 1, rows, num_tiles) - row;
        const Fetch fetch = t < 2 ? Fetch::HalfOf(next, t) : Fetch{packed_b, 0, 0};
        TileOf(edge, std::make_integer_sequence<int, kTileRows>())(
            packed_a + t * kTileRows * now, packed_b, now, fetch, write, c + row * stride + col, stride,
            width);
      }
    }
  }
}

// c[rows, cols] = a b for up to kFewRows rows. Reads b once and as it lies, which is along its edge.
void FewRows(int64_t rows, int64_t cols, int64_t inner, Operand a, Operand b, float* c,
             int64_t stride) {
  constexpr int kAtOnce = 8;  // lines of b
  for (int64_t r = 0; r < rows; ++r) std::fill_n(c + r * stride, cols, 0.0f);
  for (int64_t k = 0; k < inner; k += kAtOnce) {
    const int now = std::min<int64_t>(kAtOnce, inner - k);
    float x[kFewRows][kAtOnce] = {};
    const float* line[kAtOnce];
    for (int j = 0; j < kAtOnce; ++j) {
      line[j] = b.At(0, k + std::min(j, now - 1)).data;
      for (int64_t r = 0; r < rows && j < now; ++r) x[r][j] = *a.At(r, k + j).data;
    }
    int64_t col = 0;
    for (; col + kLanes <= cols; col += kLanes) {
      Vec w[kAtOnce];
      for (int j = 0; j < kAtOnce; ++j) {
        w[j] = Load(line[j] + col);
        __builtin_prefetch(line[j] + col + kAtOnce * b.along_inner, 0, 2);
      }
      for (int64_t r = 0; r < rows; ++r) {
        Vec sum = Load(c + r * stride + col);
        for (int j = 0; j < kAtOnce; ++j) sum += x[r][j] * w[j];
        Store(c + r * stride + col, sum);
      }
    }
    for (; col < cols; ++col) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int j = 0; j < kAtOnce; ++j) c[r * stride + col] += x[r][j] * line[j][col];
      }
    }
  }
}

// A rectangle of one group's result.
struct Task {
  int64_t group, row, num_rows, col, num_cols;
};

// Cuts results of rows_of(group) x cols into tasks, enough of them for the threads.
template <typename RowsOf>
std::vector<Task> Cut(int64_t num_groups, RowsOf rows_of, int64_t cols, int64_t num_threads) {
  auto parts_of = [&](int64_t group) { return CeilDiv(rows_of(group), kTaskTiles * kTileRows); };
  int64_t row_parts = 0, col_parts = CeilDiv(cols, kTaskCols);
  for (int64_t group = 0; group < num_groups; ++group) row_parts += parts_of(group);
  const int64_t wanted = num_threads > 1 ? 4 * num_threads : 1;
  while (row_parts * col_parts < wanted && cols / col_parts > 8 * kTileCols) col_parts *= 2;
  std::vector<Task> tasks;
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t rows = rows_of(group), parts = parts_of(group);
    for (int64_t i = 0; i < parts * col_parts; ++i) {
      const int64_t row = Begin(i / col_parts, rows, parts), part = i % col_parts;
      const int64_t col = Begin(part, cols, col_parts);
      tasks.push_back({group, row, Begin(i / col_parts + 1, rows, parts) - row, col,
                       Begin(part + 1, cols, col_parts) - col});
    }
  }
  return tasks;
}

// Runs every task on the caller and the pool's threads. A thread that comes late finds nothing left to
// do, so the caller never waits for one that has not begun.
template <typename Run>
void InParallel(ffi::ThreadPool& pool, std::vector<Task> tasks, Run run) {
  struct Shared {
    Shared(std::vector<Task> tasks, Run run) : tasks(std::move(tasks)), run(std::move(run)) {}
    const std::vector<Task> tasks;
    const Run run;
    std::atomic<size_t> next{0}, done{0};  // counting also completes the streamed stores
    std::mutex mutex;
    std::condition_variable all_done;
  };
  const size_t count = tasks.size();
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  auto shared = std::make_shared<Shared>(std::move(tasks), std::move(run));
  std::function<void()> help = [shared, count] {
    for (size_t i; (i = shared->next++) < count;) {
      shared->run(shared->tasks[i]);
      if (++shared->done < count) continue;
      std::lock_guard<std::mutex> lock(shared->mutex);
      shared->all_done.notify_all();
    }
  };
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(std::function<void()>(help));
  help();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->all_done.wait(lock, [&] { return shared->done == count; });
}

// The first row of each group and the end of the last.
std::vector<int64_t> Starts(const Ints& group_sizes, int64_t num_rows) {
  std::vector<int64_t> starts = {0};
  for (size_t i = 0; i < group_sizes.element_count(); ++i) {
    const int64_t size = std::max(0, group_sizes.typed_data()[i]);
    starts.push_back(std::min(num_rows, starts.back() + size));
  }
  return starts;
}

// A large result is fresh memory more often than not: a page fault for 2 MiB costs less than 512.
void InLargePages(Floats& buffer) {
#if defined(__linux__)
  if (buffer.size_bytes() <= kLarge) return;
  constexpr uintptr_t kPage = 1 << 21;
  const auto begin = reinterpret_cast<uintptr_t>(buffer.typed_data());
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  madvise(reinterpret_cast<void*>(first), begin + buffer.size_bytes() - first, MADV_HUGEPAGE);
#endif
}

// y[R, N]: rows of x[R, K] times their group's w[K, N], or w[N, K] transposed; zero past the groups.
ffi::Error Rows(ffi::ThreadPool pool, Floats x, Floats w, Ints group_sizes, bool transposed,
                ffi::Result<Floats> y) {
  const int64_t num_rows = x.dimensions()[0], inner = x.dimensions()[1], cols = y->dimensions()[1];
  const std::vector<int64_t> starts = Starts(group_sizes, num_rows);
  InLargePages(*y);
  float* y_data = y->typed_data();
  std::fill(y_data + starts.back() * cols, y_data + num_rows * cols, 0.0f);
  auto rows_of = [&](int64_t group) { return starts[group + 1] - starts[group]; };
  auto tasks = Cut(starts.size() - 1, rows_of, cols, pool.num_threads());
  InParallel(pool, std::move(tasks), [=](const Task& task) {
    const int64_t row = starts[task.group] + task.row;
    const Operand a = {x.typed_data() + row * inner, inner, 1};
    const float* matrix = w.typed_data() + task.group * inner * cols;
    const Operand b = transposed ? Operand{matrix, inner, 1} : Operand{matrix, 1, cols};
    float* c = y_data + row * cols + task.col;
    if (task.num_rows <= kFewRows && !transposed) {
      FewRows(task.num_rows, task.num_cols, inner, a, b.At(task.col, 0), c, cols);
    } else {
      Product(task.num_rows, task.num_cols, inner, a, b.At(task.col, 0), Write::kSet, c, cols);
    }
  });
  return ffi::Error::Success();
}

// dw[E, M, N]: x[R, M] transposed times dy[R, N], of the rows of each group; zero where it has none.
ffi::Error Matrices(ffi::ThreadPool pool, Floats x, Floats dy, Ints group_sizes,
                    ffi::Result<Floats> dw) {
  const int64_t rows = x.dimensions()[1], cols = dy.dimensions()[1];
  const std::vector<int64_t> starts = Starts(group_sizes, x.dimensions()[0]);
  InLargePages(*dw);
  float* dw_data = dw->typed_data();
  const Write write = dw->size_bytes() > kLarge ? Write::kStream : Write::kSet;
  auto tasks = Cut(starts.size() - 1, [=](int64_t) { return rows; }, cols, pool.num_threads());
  InParallel(pool, std::move(tasks), [=](const Task& task) {
    const int64_t first = starts[task.group], inner = starts[task.group + 1] - first;
    float* c = dw_data + (task.group * rows + task.row) * cols + task.col;
    if (inner == 0) {
      for (int64_t r = 0; r < task.num_rows; ++r) std::fill_n(c + r * cols, task.num_cols, 0.0f);
      return;
    }
    const Operand a = {x.typed_data() + first * rows + task.row, 1, rows};
    const Operand b = {dy.typed_data() + first * cols + task.col, 1, cols};
    Product(task.num_rows, task.num_cols, inner, a, b, write, c, cols);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_grouped_rows, Rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Attr<bool>("transposed")
                                  .Ret<Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_grouped_matrices, Matrices,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Ret<Floats>());
